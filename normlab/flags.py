"""What stands behind a flag: presets and TOML files become flags of their own, and counts may be written short.

Everything is done on the command line's words, before they are parsed, so that one parser checks all there is to check:
a preset comes first, then the file, then what the user typed, and the last one wins.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError, unknown
from normlab.models.config import PRESETS

_COUNTS = ("--tokens", "--eval-tokens")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


def expand(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """`words` after a verb, with `--preset` and `--toml` spelled out; `known` are the names that a file may set."""
    words = list(words)
    file = _value_of(words, "--toml")
    settings = {} if file is None else _read(Path(file), set(known))
    preset = _value_of(words, "--preset") or settings.pop("preset", None)
    return [*_count_words([*_preset_words(preset), *_words(settings), *words])]


def field_names(*configs: type) -> set[str]:
    """The names of all fields of some dataclasses."""
    return {field.name for config in configs for field in dataclasses.fields(config)}


def _value_of(words: Sequence[str], flag: str) -> str | None:
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _preset_words(name: str | None) -> list[str]:
    if name is None:
        return []
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return _words(PRESETS[name] | {"length": PRESETS[name]["max_length"]})


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NormLabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NormLabError(f"{path} is no TOML: {error}") from None
    flat = {}
    for name, value in found.items():
        # Tables are for the reader: [model], [data]. The names are the same with and without them.
        flat |= value if isinstance(value, dict) else {name: value}
    for name in flat:
        if name.replace("-", "_") not in known | {"preset"}:
            raise unknown(f"setting in {path.name}", name, known)
    return flat


def _words(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def _count_words(words: Sequence[str]) -> Iterable[str]:
    """33M and 1.5e9 as whole numbers, where a count is expected."""
    before = ""
    for word in words:
        flag, sign, value = word.partition("=")
        if sign and flag in _COUNTS:
            yield f"{flag}={count(value)}"
        else:
            yield str(count(word)) if before in _COUNTS else word
        before = word


def count(text: str) -> int:
    """A number of things: 200000, 200k, 33M, 1.5B, 3e7."""
    match = re.fullmatch(r"([\d_.]+(?:[eE]\+?\d+)?)([kmbgKMBG]?)", text)
    try:
        value = float(match[1]) * _UNITS[match[2].lower()] if match else None
    except ValueError:
        value = None
    if value is None or value != int(value):
        raise NormLabError(f"{text!r} is not a count; expected a whole number, e.g. 200000, 33M or 1.5B")
    return int(value)
