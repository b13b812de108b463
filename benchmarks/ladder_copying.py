"""Do the gaps of short runs come from who copies from the context first? From the rows of a ladder; nothing is trained.

    python benchmarks/ladder_copying.py benchmarks/results/studies/ladder/main

Copying is the loss of a random sequence less the loss of its repetition right behind it, at the end of a run
(normlab/probes/copying.py). For each cell: losses, copying with its range over seeds. For each budget: the correlation
of loss and copying over runs of one cell (each cell's mean subtracted), with Fisher's 95 % interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

from normlab.compare.report.copy_gain import copy_gain
from normlab.compare.store import Store
from normlab.pages.numbers import format_count
from normlab.studies.exact import correlation_interval, pearson

LEVEL = 0.95


@dataclass(frozen=True)
class Run:
    """What is needed of one judged run."""

    size: str
    budget: int
    scheme: str
    loss: float
    sets: dict[str, float]
    copying: float


def main(ladder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print a table of cells and the correlations within them."""
    judged = (row for row in Store(ladder).rows() if row["role"] == "judge" and row["state"] == "done")
    runs = [run for row in judged if (run := _run(row)) is not None]
    cells = _grouped(runs, lambda run: (run.size, run.budget, run.scheme))
    for (size, budget, scheme), own in sorted(cells.items(), key=lambda cell: (cell[0][:2], cell[1][0].loss)):
        copied = [run.copying for run in own]
        sets = ", ".join(f"{name} {fmean(run.sets[name] for run in own):.3f}" for name in own[0].sets)
        print(
            f"{size:8} {format_count(budget):>6} {scheme:16} loss {fmean(run.loss for run in own):.3f} ({sets}), "
            f"copying {fmean(copied):.2f} ({min(copied):.2f} to {max(copied):.2f}), {len(own)} seeds"
        )
    for budget, own in sorted(_grouped(runs, lambda run: run.budget).items()):
        _print_correlation(budget, list(_grouped(own, lambda run: (run.size, run.scheme)).values()))


def _run(row: dict[str, Any]) -> Run | None:
    """None where copying was not measured."""
    copying = copy_gain(row["profiles"][-1]) if row.get("profiles") else None
    if copying is None:
        return None
    sets = {name.removeprefix("loss_"): value for name, value in row.items() if name.startswith("loss_")}
    return Run(row["size"], row["budget"], row["label"], row["loss"], sets, copying)


def _grouped(runs: Iterable[Run], key: Any) -> dict[Any, list[Run]]:
    found = defaultdict(list)
    for run in runs:
        found[key(run)].append(run)
    return dict(found)


def _print_correlation(budget: int, cells: list[list[Run]]) -> None:
    several = [own for own in cells if len(own) > 1]
    losses = [run.loss - fmean(other.loss for other in own) for own in several for run in own]
    copied = [run.copying - fmean(other.copying for other in own) for own in several for run in own]
    free = len(losses) - len(several) - 2
    if free < 1:
        print(f"{format_count(budget)} tokens: too few runs for a correlation")
        return
    r = pearson(losses, copied)
    low, high = correlation_interval(r, free, LEVEL)
    print(f"{format_count(budget)} tokens: loss and copying within a cell r = {r:+.2f} ({low:+.2f} to {high:+.2f}), "
          f"{len(losses)} runs of {len(several)} cells")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
