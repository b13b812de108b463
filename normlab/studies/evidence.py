"""Evidence: query the result rows of a study by scheme, arm, learning rate and seed.

A run that failed, diverged or was stuck has no result; every rule counts such runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from normlab.compare.statistics import SchemeResult, rank_schemes
from normlab.errors import NormLabError, unknown
from normlab.studies.values import row_number, row_numbers
from normlab.utils.text import counted

Row = Mapping[str, Any]

VALUE = "value"
"""Field of a row with the metric of a comparison: the validation loss, or the accuracy."""


@dataclass(frozen=True)
class Sample:
    """Results of one scheme in one arm, by seed; None is a run without a result."""

    name: str
    """Name of the scheme, with its arm if one was given."""
    values: dict[int, float | None]
    problems: list[str] = field(default_factory=list)
    """Reasons why the results do not allow a verdict."""
    notes: list[str] = field(default_factory=list)
    unit: str = "seed"
    """What the values differ in: "seed", or "repeat" in a benchmark, whose rows have several values each."""

    @property
    def finished(self) -> dict[int, float]:
        return {seed: value for seed, value in self.values.items() if value is not None}


class Evidence:
    """Rows by arm. `names` maps schemes as written in a study to their names in the registry."""

    def __init__(self, rows: Mapping[str, Sequence[Row]], names: Mapping[str, str] | None = None):
        self.rows = {arm: list(own) for arm, own in rows.items()}
        self._names = dict(names or {})

    def arms(self, patterns: Sequence[str]) -> list[str]:
        """The arms that match any of the patterns; all if there are none."""
        found = [arm for arm in self.rows if not patterns or any(fnmatchcase(arm, p) for p in patterns)]
        if not found:
            raise NormLabError(f"no arm matches {', '.join(patterns)}; there are {', '.join(self.rows) or 'none'}")
        return found

    def canonical(self, scheme: str) -> str:
        """Name of a scheme in the rows."""
        return self._names.get(scheme, scheme)

    def of(self, scheme: str, arm: str) -> list[Row]:
        """A scheme's rows in an arm, or in the arm given with the scheme: "pre@weight_decay=0.0"."""
        name, _, named = scheme.partition("@")
        place = named or arm
        if place not in self.rows:
            raise unknown("arm with rows", place, self.rows)
        return [row for row in self.rows[place] if row["scheme"] == self.canonical(name)]

    def sample(self, scheme: str, arm: str, path: str) -> Sample:
        """A scheme's results at the rate selected by its tune runs; all results if nothing was tuned."""
        rows = self.of(scheme, arm)
        if not rows:
            return Sample(scheme, {}, [f"{scheme} has no runs"])
        standing = _standing(rows)
        judged = [row for row in rows if row.get("role", "judge") == "judge"]
        chosen = judged if standing is None else [row for row in judged if row["lr"] == standing.lr]
        values = {key: value for row in chosen for key, value in _observed(row, path)}
        failed = [row for row in chosen if not is_sound(row)]
        problems = [f"{scheme}: {len(failed)} of {len(chosen)} runs {_how(failed)}"] if failed else []
        missing = sum(value is None for value in values.values()) - len(failed)
        problems += [f"{scheme}: {missing} runs have no {path}"] if missing else []
        notes: list[str] = []
        # Which loss is lower depends on the rates; what a model does inside is shown at the best of those tried.
        (problems if path == VALUE else notes).extend(_edges(scheme, standing))
        unit = "repeat" if len(values) > len(chosen) else "seed"
        return Sample(scheme, values, problems, notes, unit)

    def at_start(self, scheme: str, arm: str, path: str) -> Sample:
        """What was measured before training, by seed, whatever became of the run: all rates of a seed start alike."""
        rows = self.of(scheme, arm)
        found = {row["seed"]: row_number(row, path) for row in reversed(rows)}
        missing = [seed for seed, value in found.items() if value is None]
        problems = [f"{scheme}: no {path} with {counted(len(missing), 'seed')}"] if missing else []
        return Sample(scheme, found, problems if rows else [f"{scheme} has no runs"])

    def all(self, schemes: Sequence[str], arms: Sequence[str]) -> list[Row]:
        """Every row of these schemes (all if there are none) in these arms, at any rate."""
        wanted = {self.canonical(name) for name in schemes}
        rows = [row for arm in self.arms(arms) for row in self.rows[arm]]
        return [row for row in rows if not wanted or row["scheme"] in wanted]


def is_sound(row: Row) -> bool:
    """Whether a run has a result that may be part of a mean."""
    return row["state"] == "done" and not row.get("stuck")


def has(row: Row, what: str) -> bool:
    """Whether a run failed, diverged, was stuck, spiked or skipped steps."""
    if what == "failed":
        return row["state"] == "failed"
    if what == "diverged":
        return row.get("diverged") is not None
    if what == "stuck":
        return bool(row.get("stuck"))
    return bool(row.get({"spiked": "spikes", "skipped": "skipped"}[what]))


def _observed(row: Row, path: str) -> list[tuple[int, float | None]]:
    """Values at a path. A list has one observation per entry, as in a repeated benchmark."""
    if not is_sound(row):
        return [(row["seed"], None)]
    found = row_numbers(row, path)
    if len(found) > 1:
        return [(row["seed"] * 1000 + k, value) for k, value in enumerate(found)]
    return [(row["seed"], row_number(row, path))]


def _standing(rows: Sequence[Row]) -> SchemeResult | None:
    """Selected learning rate of a scheme and its edge; None for rows without rates (e.g. checks and benchmarks)."""
    if any("lr" not in row for row in rows):
        return None
    found = rank_schemes(rows, rows[0]["scheme"])[0]
    return found if found.lr is not None else None


def _edges(scheme: str, standing: SchemeResult | None) -> list[str]:
    """A best rate that is not between two others: a claim on it would be one on the list of rates."""
    if standing is None or standing.edge is None:
        return []
    more = f"add a {'larger' if standing.edge == 'largest' else 'smaller'} one to lrs"
    return [f"the best rate of {scheme} is the {standing.edge} tried ({standing.lr:g}): {more}"]


def _how(rows: Sequence[Row]) -> str:
    kinds = [what for what in ("diverged", "stuck") if any(has(row, what) for row in rows)]
    return " or ".join(kinds) if kinds else "failed"
