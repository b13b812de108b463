"""Counts written with a unit: 200k, 33M, 1.5B, 2T. `Count` is an int that flags and TOML files may give in that way."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from tyro.constructors import PrimitiveConstructorSpec

from normlab.errors import NormLabError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_count(text: str) -> int:
    """A whole number from text: 200000, 200k, 33M, 1.5B, 3e7."""
    match = re.fullmatch(r"([\d_.]+(?:[eE]\+?\d+)?)([kmbgtKMBGT]?)", text)
    try:
        value = float(match[1]) * _UNITS[match[2].lower()] if match else None
    except ValueError:
        value = None
    if value is None or not value.is_integer():
        raise NormLabError(f"{text!r} is not a count; expected a whole number, e.g. 200000, 33M or 1.5B")
    return int(value)


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: parse_count(words[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    ),
]


def is_count(kind: Any) -> bool:
    """Whether a type is `Count` or `Count | None`."""
    return Count in (kind, *get_args(kind))
