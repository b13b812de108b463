"""Copying from the context, as a table: how much easier a random sequence is when it is repeated, through training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from normlab.compare.report.copy_gain import COPYING_NOTE, copy_gain, gain_words
from normlab.compare.report.results import Results
from normlab.pages.numbers import NONE
from normlab.pages.tables import Cell, Column, Table, numeric_cell


def copying_table(results: Results) -> Table:
    """The gain of copying at each profile: mean over the runs that represent a scheme."""
    profiles = [[p for run in results.chosen(scheme) for p in run.metrics.profile] for scheme in results.schemes]
    steps = sorted({int(p["step"]) for own in profiles for p in own})
    columns = [Column("Scheme"), *(Column(f"Step {step:,}", True) for step in steps)]
    rows = [
        [Cell(results.label(scheme), results.label(scheme).lower(), scheme=k), *_cells(own, steps)]
        for k, (scheme, own) in enumerate(zip(results.schemes, profiles, strict=True))
    ]
    note = f"{COPYING_NOTE} Mean over the runs that represent the scheme."
    found = Table("Copying from the context", columns, rows, note=note).filled()
    # Encoders and images have nothing to copy; earlier versions did not measure it.
    return found if len(found.columns) > 1 else Table(found.caption, [], [])


def _cells(profiles: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[Cell]:
    gains = [[copy_gain(p) for p in profiles if p["step"] == step] for step in steps]
    known = [[gain for gain in own if gain is not None] for own in gains]
    means = [fmean(own) if own else None for own in known]
    return [numeric_cell(NONE if mean is None else gain_words(mean), mean) for mean in means]
