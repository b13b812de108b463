"""Read the metrics of a run (metrics.jsonl), tolerating truncated lines, missing fields and non-finite numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from normlab.pages.numbers import finite_or_none
from normlab.train.storage.sinks import read_records

Record = dict[str, Any]
Columns = dict[str, list[float | None]]
PROFILES = ("hidden_rms", "update_ms", "angular_speed", "token_cosine", "effective_rank", "grad_norm")
"""Series of a profile record, one value for each block boundary (`normlab/train/monitor/profile.py`)."""


@dataclass(frozen=True)
class Metrics:
    """The records of `metrics.jsonl` by kind, each in the order of its steps."""

    step: list[Record] = field(default_factory=list)
    eval: list[Record] = field(default_factory=list)
    profile: list[Record] = field(default_factory=list)
    event: list[Record] = field(default_factory=list)

    def last(self, name: str) -> float | None:
        """The last finite value of a field of the training steps."""
        return next(
            (value for row in reversed(self.step) if (value := finite_or_none(row.get(name))) is not None), None
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Training throughput in tokens per second, without the first steps of a process, which compile the model.

        None if the steps are not consecutive, as in the coarse history of a row: the row itself has a throughput.
        """
        begins = {finite_or_none(event.get("step")) for event in self.event if event.get("what") == "resume"}
        tokens = seconds = 0.0
        for before, after in pairwise(self.step):
            if after["step"] == before["step"] + 1 and before["step"] not in begins:
                made, took = (_gain(before, after, name) for name in ("tokens", "seconds"))
                if made is not None and took is not None:
                    tokens, seconds = tokens + made, seconds + took
        return tokens / seconds if seconds > 0.0 else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation at that throughput; FLOPs per token and the device's peak are constant."""
        speed, rate, share = self.tokens_per_s, self.last("tokens_per_s"), self.last("mfu")
        return None if speed is None or not rate or share is None else share * speed / rate


def read_metrics(path: Path) -> Metrics:
    """All records of a run; empty if there is no file yet."""
    found = Metrics()
    for record in read_records(path):
        kind = record.get("kind")
        if kind in ("step", "eval", "profile", "event") and finite_or_none(record.get("step")) is not None:
            getattr(found, kind).append(record)
    return found


def metrics_of_row(row: Mapping[str, Any]) -> Metrics:
    """Coarse history of a run from its row alone; empty for rows of version 0.1.

    The time of a point is proportional to its step: the row has no other clock.
    """
    table, evals = row.get("curve"), row.get("evals")
    steps = [] if not isinstance(table, dict) else [
        {"kind": "step", **_place(row, min((k + 1) * table["every"], row["steps"])), "loss": mean}
        for k, mean in enumerate(table["mean"])
    ]  # fmt: skip
    evaluations = [] if not isinstance(evals, dict) else [
        {"kind": "eval", **dict(zip(evals, values, strict=True)), **_place(row, values[0])}
        for values in zip(*evals.values(), strict=True)
    ]  # fmt: skip
    return Metrics(step=steps, eval=evaluations, profile=list(row.get("profiles") or []))


def _place(row: Mapping[str, Any], step: int) -> Record:
    share = step / row["steps"] if row["steps"] else 0.0
    return {"step": step, "tokens": round(share * row["tokens"]), "seconds": share * row["seconds"]}


def metric_columns(records: Sequence[Record], names: Sequence[str], stride: int) -> Columns:
    """One list per field, with `stride` records averaged into a point; a point without a finite value is None.

    Buckets are counted from the first record, so that runs that log at the same steps share their points.
    """
    starts = range(0, len(records), stride)
    return {name: [_mean(records[start : start + stride], name) for start in starts] for name in names}


def with_seconds(steps: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Add times to records without one, interpolated between the training steps."""
    known = [(s["step"], t) for s in steps if (t := finite_or_none(s.get("seconds"))) is not None]
    if not known:
        return list(records)
    at, seconds = zip(*known, strict=True)
    return [{"seconds": float(np.interp(record["step"], at, seconds)), **record} for record in records]


def profile_values(record: Mapping[str, Any], name: str) -> dict[int, float]:
    """Value at each block boundary; a shorter list (one value per block) belongs to the ends of the blocks."""
    layers, values = record.get("layers"), record.get(name)
    if not isinstance(layers, list) or not isinstance(values, list) or not values:
        return {}
    pairs = zip(reversed(layers), reversed(values), strict=False)
    return {int(k): v for k, x in pairs if (v := finite_or_none(x)) is not None and finite_or_none(k) is not None}


def _gain(before: Record, after: Record, name: str) -> float | None:
    first, second = finite_or_none(before.get(name)), finite_or_none(after.get(name))
    return None if first is None or second is None else second - first


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [value for record in records if (value := finite_or_none(record.get(name))) is not None]
    return sum(values) / len(values) if values else None
