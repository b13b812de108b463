"""Errors for the user: one line that says what is wrong, what was expected and what to try."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_LONGEST = 300
"""Characters of another library's error that are shown."""


class NormLabError(Exception):
    """An error in the user's input. The command line prints only its message and exits with status 2."""


def unknown(kind: str, name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> NormLabError:
    """An error for an unknown name, with the closest known name as a suggestion."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), [*names, *aliases], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return NormLabError(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")


def advice_for(config: Any, name: str) -> str:
    """What to try instead of a wrong value of a dataclass's field: its default, or to leave the field out."""
    default = next(field.default for field in dataclasses.fields(config) if field.name == name)
    if default is dataclasses.MISSING:
        return "give another value"
    return "leave it out" if default is None else f"try {default}"


@contextmanager
def in_one_line(what: str, advice: str) -> Iterator[None]:
    """Turn any exception of other people's code into a NormLabError: `what (Error: its first line); advice`."""
    try:
        yield
    except NormLabError:
        raise
    # A model that is too large or calls sys.exit() is as wrong a target as one with a bug; Ctrl-C is not its doing.
    except (Exception, SystemExit) as error:
        raise NormLabError(f"{what} ({reason(error)}); {advice}") from error


def reason(error: BaseException) -> str:
    """The type and the first line of an exception."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__
