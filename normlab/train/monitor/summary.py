"""Summary of a run for its row in a comparison: binned loss curve, profiles, spikes and skipped steps.

Free of torch: it is made of the records in metrics.jsonl, whoever trained, and also of a run that failed. Numbers have
five digits: about 10 kB for 12 blocks and at most 55 kB for 128, so that a hundred runs stay below 10 MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from normlab.utils.spaced import evenly_spaced

Record = dict[str, Any]
Number = float | None

BINS = 200
"""Most points of the loss curve."""

BOUNDARIES = 129
"""Most block boundaries of a profile that are kept."""

_PROFILES = 8
"""Most profiles that are kept."""

_OF_WHOLE_MODEL = ("sensitivity", "first_copy_loss", "second_copy_loss")
"""Fields of a profile with one number for the whole model."""

_TROUBLE = {"spike": "spikes", "nonfinite": "nonfinite", "skip": "skipped", "rollback": "rollbacks"}
"""Events that are counted, and the names of the counts."""


def summarise(records: Iterable[Record], steps: int) -> dict[str, Any]:
    """Fields of a row: `curve`, `evals`, `profiles`, `sensitivity` (the last one) and counts of trouble.

    `steps` is how many the run was to have, so that the curves of runs of one length have the same bins.
    """
    by_kind: dict[str, list[Record]] = {"step": [], "eval": [], "profile": [], "event": []}
    for record in records:
        by_kind.setdefault(str(record.get("kind")), []).append(record)
    profiles = [_profile(by_kind["profile"][k]) for k in evenly_spaced(len(by_kind["profile"]), _PROFILES)]
    return {
        "curve": curve(by_kind["step"], steps),
        "evals": _columns(by_kind["eval"]),
        "profiles": profiles,
        "sensitivity": profiles[-1].get("sensitivity") if profiles else None,
        **{name: sum(event.get("what") == what for event in by_kind["event"]) for what, name in _TROUBLE.items()},
    }


def curve(records: Sequence[Record], steps: int) -> dict[str, Any]:
    """Mean and largest training loss, and the largest gradient norm, of every `every` steps.

    A largest value is None where one of the bin is not finite; a mean is that of the finite ones.
    """
    every = max(1, math.ceil(steps / BINS))
    bins: dict[int, list[Record]] = {}
    for record in records:
        bins.setdefault((int(record["step"]) - 1) // every, []).append(record)
    rows = [bins.get(place, []) for place in range(max(bins, default=-1) + 1)]
    return {
        "every": every,
        "mean": [_mean([record.get("loss") for record in row]) for row in rows],
        "max": [_largest([record.get("loss") for record in row]) for row in rows],
        "grad_max": [_largest([record.get("grad_norm") for record in row]) for row in rows],
    }


def digits(value: Any) -> Number:
    """A number with five digits; None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _profile(record: Record) -> Record:
    kept = evenly_spaced(len(record.get("layers") or []), BOUNDARIES)
    series = {name: value for name, value in record.items() if isinstance(value, list)}
    found = {name: [digits(value[k]) for k in kept] for name, value in series.items() if len(value) > max(kept)}
    of_model = {name: digits(record[name]) for name in _OF_WHOLE_MODEL if name in record}
    return {"step": record.get("step"), **found, **of_model}


def _columns(records: Sequence[Record]) -> dict[str, list[Number]]:
    names = [name for name in (records[0] if records else {}) if name not in ("kind", "tokens")]
    return {name: [digits(record.get(name)) for record in records] for name in names}


def _mean(values: Sequence[Any]) -> Number:
    finite = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return digits(math.fsum(finite) / len(finite)) if finite else None


def _largest(values: Sequence[Any]) -> Number:
    finite = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    return digits(max(values)) if values and finite else None
