"""LadderRow: the final loss of one run of a ladder. All statistics and pages of a ladder start from these rows.

A row is one scheme at one size, one budget of tokens and one seed. Budgets of one size, scheme and seed may be cooldown
branches of one trunk: then their noise is correlated, and they are not independent seeds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import NormLabError
from normlab.pages import numbers
from normlab.utils.counts import count

REQUIRED = ("scheme", "parameters", "tokens", "flops", "seed", "loss")
"""Columns of a table of losses; `size`, `steps`, `trunk`, `tokens_per_s`, `lr` and `state` may be added."""


@dataclass(frozen=True)
class LadderRow:
    """One ended run: its place on the ladder and its final validation loss."""

    scheme: str
    size: str
    """Name of the model size, "12x768"; a table without names has the number of parameters in words, "110M"."""
    parameters: int
    tokens: int
    flops: float
    """FLOPs of training on these tokens, attention and head included."""
    seed: int
    loss: float | None
    """Final validation loss in nats a token; None where the run has none."""
    steps: int | None = None
    trunk: str | None = None
    """Name of the trunk that this run is a cooldown branch of; rows with the same trunk share most of their path."""
    tokens_per_s: float | None = None
    """Training speed, where the run had the device for itself."""
    lr: float | None = None
    state: str = "done"
    """done, stuck (no better than the unigram entropy), diverged or failed: only rows that are done enter a fit."""
    started: str | None = None
    """When the run began, in ISO format."""
    forecast: str | None = None
    """Hash of the forecast that was written before this run began, for rows of the size that is held out."""

    @property
    def is_usable(self) -> bool:
        """Whether the row enters a fit."""
        return self.state == "done" and self.loss is not None and math.isfinite(self.loss)

    @property
    def cell(self) -> tuple[int, int]:
        """Parameters and tokens: the place on the ladder."""
        return self.parameters, self.tokens


def read_table(path: Path) -> list[LadderRow]:
    """The rows of a CSV table that somebody else's runs may have filled: the required columns, and any optional one.

    Counts may have units (29.5M). An empty loss, nan or inf is a run that did not train.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise NormLabError(f"cannot read {path}: {error}; expected a CSV table with {', '.join(REQUIRED)}") from None
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise NormLabError(f"{path} has no column {missing[0]}; expected {', '.join(REQUIRED)} in its first line")
    rows = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=2)]
    _refuse_repeats(rows, path)
    return rows


def _parse(line: Mapping[str | None, str | None], place: str) -> LadderRow:
    text = {str(name): (value or "").strip() for name, value in line.items() if not isinstance(value, list)}
    try:
        parameters, loss = count(text["parameters"]), _number(text["loss"])
        trained = loss is not None and math.isfinite(loss)
        row = LadderRow(
            scheme=text["scheme"], size=text.get("size") or numbers.count(parameters), parameters=parameters,
            tokens=count(text["tokens"]), flops=float(text["flops"]), seed=int(text["seed"]),
            loss=loss if trained else None,
            steps=count(text["steps"]) if text.get("steps") else None, trunk=text.get("trunk") or None,
            tokens_per_s=_number(text.get("tokens_per_s")), lr=_number(text.get("lr")),
            state=text.get("state") or ("done" if trained else "failed"),
        )  # fmt: skip
    except (ValueError, NormLabError) as error:
        raise NormLabError(f"{place}: {error}; expected {', '.join(REQUIRED)}") from None
    if not row.scheme or row.parameters <= 0 or row.tokens <= 0 or not (0.0 < row.flops < math.inf):
        raise NormLabError(f"{place}: scheme, parameters, tokens and flops must be given and positive")
    return row


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _refuse_repeats(rows: list[LadderRow], path: Path) -> None:
    seen = set()
    for row in rows:
        key = (row.scheme, row.cell, row.seed)
        if key in seen:
            raise NormLabError(
                f"{path}: {row.scheme} with {row.size}, {row.tokens:,} tokens and seed {row.seed} is listed twice; "
                "keep one row"
            )
        seen.add(key)
