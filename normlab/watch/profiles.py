"""Per-block profiles for the page: the records of a run and those of `normlab.checks.Watch` in one form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normlab.pages.numbers import finite_or_none
from normlab.train.monitor.summary import BOUNDARIES, digits
from normlab.utils.spaced import evenly_spaced

Series = list[float | None]

MEASURES: dict[str, str] = {
    "hidden_rms": "Size of the hidden state (RMS)",
    "update_rms": "Size of what each block adds (RMS)",
    "angular_speed": "Angle by which a block turns a token (radians)",
    "token_cosine": "Likeness of two tokens (mean cosine; 1: all alike)",
    "effective_rank": "Directions that the tokens use (effective rank)",
    "grad_norm": "Gradient of the loss that arrives here",
}
"""Measures of a profile, with their titles."""

_FROM_WATCH = {
    "hidden_rms": "rms", "update_rms": "branch_rms", "angular_speed": "ang", "token_cosine": "cos",
    "effective_rank": "erank", "grad_norm": "grad_h",
}  # fmt: skip
_OF_BLOCKS = ("update_rms", "angular_speed")
"""Measures of blocks, not of boundaries: `Watch` has one number less of them."""


def read_profile(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Step, block boundaries and series of a profile record; None if it has none."""
    found = _from_watch(record["profile"]) if isinstance(record.get("profile"), Mapping) else _from_run(record)
    lengths = {len(series) for series in found.values()}
    if len(lengths) != 1 or not (count := lengths.pop()):
        return None
    kept = evenly_spaced(count, BOUNDARIES)
    return {
        "step": record.get("step"),
        "layers": kept,
        **{name: [digits(series[k]) for k in kept] for name, series in found.items()},
    }


def _from_run(record: Mapping[str, Any]) -> dict[str, Series]:
    updates = [None if value is None else math.sqrt(abs(value)) for value in _numbers(record.get("update_ms"))]
    found = {name: _numbers(record.get(name)) for name in MEASURES if name != "update_rms"} | {"update_rms": updates}
    return {name: found[name] for name in MEASURES if found[name]}


def _from_watch(profile: Mapping[str, Any]) -> dict[str, Series]:
    found = {name: _numbers(profile.get(theirs)) for name, theirs in _FROM_WATCH.items()}
    return {name: [None, *found[name]] if name in _OF_BLOCKS else found[name] for name in found if found[name]}


def _numbers(values: Any) -> Series:
    return [finite_or_none(value) for value in values] if isinstance(values, list) else []
