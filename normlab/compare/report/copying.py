"""Copying from the context, as a table: how much easier a random sequence is when it is repeated, through training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from normlab.compare.report.results import Results
from normlab.pages.numbers import NONE, finite_or_none, minus
from normlab.pages.tables import Cell, Column, Table, numeric_cell

COPYING_NOTE = (
    "Nats by which the loss of a sequence of random tokens falls when it is repeated: 0 for a model that does not copy "
    "from its context (it has no induction heads)."
)


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


def copy_gain(profile: Mapping[str, Any]) -> float | None:
    """Loss of the first copy less that of the second; None where it was not measured or is not finite."""
    first, second = (finite_or_none(profile.get(f"{copy}_copy_loss")) for copy in ("first", "second"))
    return None if first is None or second is None else first - second


def gain_words(gain: float) -> str:
    """A gain in nats, to two digits."""
    return minus(f"{gain:z.2f}")


def _cells(profiles: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[Cell]:
    gains = [[copy_gain(p) for p in profiles if p["step"] == step] for step in steps]
    known = [[gain for gain in own if gain is not None] for own in gains]
    means = [fmean(own) if own else None for own in known]
    return [numeric_cell(NONE if mean is None else gain_words(mean), mean) for mean in means]
