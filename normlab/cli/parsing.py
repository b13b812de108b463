"""Parse the words of a command with tyro; its multi-line error boxes become one line, like all other errors."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro

from normlab.errors import NormLabError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PLAIN = (
    (re.compile(r"invalid literal for int\(\) with base \d+: (.*)"), r"\1 is not a whole number"),
    (re.compile(r"could not convert string to float: (.*)"), r"\1 is not a number"),
    (re.compile(r"Expected 1 values"), "Expected one"),
    (
        re.compile(r"no type matching (.+?) could be instantiated from \[(.*?)\]\. Got errors:.*"),
        r"expected \1, got \2",
    ),
)
"""What Python says of a value that it cannot read, and the same in words."""


def parse(verbs: Mapping[str, Callable[..., Any]], words: Sequence[str], prog: str, **options: Any) -> Any:
    """What the command among `verbs` that `words` begin with returns; without one, the help of all."""
    printed, name = io.StringIO(), next(iter(words), "")
    full = f"{prog} {name}" if name in verbs else prog
    try:
        with redirect_stderr(printed):
            options |= {"config": (tyro.conf.OmitArgPrefixes,)}
            if name in verbs:  # alone, so that a mistyped option is compared with the options of this command
                del options["description"]
                return tyro.cli(verbs[name], prog=full, args=list(words[1:]), **options)
            shown = _brief(verbs) if name in ("-h", "--help") else dict(verbs)
            return tyro.extras.subcommand_cli_from_dict(shown, prog=full, args=list(words), **options)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        error = one_line(printed.getvalue(), full)
        printed = io.StringIO()
        raise NormLabError(error) from None
    finally:
        sys.stderr.write(printed.getvalue())


def _brief(verbs: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The verbs as the help of all lists them: the first paragraph of each. The rest is in the help of each."""
    return {name: _described(verb, (verb.__doc__ or "").partition("\n\n")[0]) for name, verb in verbs.items()}


def _described(verb: Callable[..., Any], words: str) -> Callable[[], Any]:
    def call() -> Any:
        return verb()

    call.__doc__ = words
    return call


def one_line(box: str, prog: str) -> str:
    """The first part of an error in a box, the options that it says may have been meant, and where all are listed."""
    said, *more = _parts(_COLOUR.sub("", box))
    near = [_names(part) for part in more if part.startswith("Perhaps you meant")]
    hint = f"did you mean {' or '.join(near[0][:2])}? " if near and near[0] else ""
    return f"{_plain(said)}; {hint}{prog} --help lists all options"


def _parts(box: str) -> list[str]:
    """The texts between the rules of a box. Its title is in the frame, or above the first rule where there is none."""
    framed = "╭" in box
    lines = [line[2:].rstrip(" │") for line in box.splitlines() if not framed or line.startswith("│")]
    parts = [part.strip("\n") for part in re.split(r"^[─-]+$", "\n".join(lines), flags=re.MULTILINE)]
    return [part for part in parts[0 if framed else 1 :] if part] or [box]


def _plain(said: str) -> str:
    """The text of a part; of options that are missing only their names."""
    if said.startswith("Missing from"):
        return f"{said.splitlines()[0].rstrip(':')}: {', '.join(_names(said))}"
    text = " ".join(said.split()).rstrip(".")
    for python, words in _PLAIN:
        text = python.sub(words, text)
    return text[:1].upper() + text[1:]


def _names(part: str) -> list[str]:
    """The options that a part lists: they are indented, their explanations twice."""
    entries = [line.strip() for line in part.splitlines()[1:] if re.match(r" {4}\S", line)]
    # {bash,zsh,fish} is one name, -h, --help are two.
    return [re.split(r"[ ,](?![^{]*\})", entry)[0] for entry in entries]
