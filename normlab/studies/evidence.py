"""Evidence: query the result rows of a study by scheme, arm, learning rate and seed.

A run that failed, diverged or was stuck has no result; every rule counts such runs. A run that was interrupted (its
process was killed) says nothing of its scheme and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from normlab.compare.statistics import SchemeResult, rank_schemes
from normlab.compare.tuning import lost_above_text
from normlab.errors import NormLabError, unknown
from normlab.pages.numbers import join_names
from normlab.studies.values import row_number, row_values
from normlab.utils.text import counted

Row = Mapping[str, Any]
Key = tuple[int, int]
"""Seed, and number of the repeat with this seed."""

_SHARED = "result"
"""Field of a row with the result of a whole check, which only the row of its first seed has."""
VALUE = "value"
"""Field of a row with the metric of a comparison: the validation loss, or the accuracy."""


@dataclass(frozen=True)
class Sample:
    """Results of one scheme in one arm, by seed and repeat; None is a run without a result."""

    name: str
    """Name of the scheme, with its arm if one was given."""
    values: dict[Key, float | None]
    problems: list[str] = field(default_factory=list)
    """Reasons why the results do not allow a verdict."""
    notes: list[str] = field(default_factory=list)
    unit: str = "seed"
    """What the values differ in: "seed", or "repeat" in a benchmark, whose rows have several values each."""

    @property
    def finished(self) -> dict[Key, float]:
        return {key: value for key, value in self.values.items() if value is not None}


def unit_of(samples: Sequence[Sample]) -> str:
    """The unit that values are paired by: seed, or repeat for repeated benchmarks."""
    return "repeat" if any(one.unit == "repeat" for one in samples) else "seed"


def unpaired(a: Sample, b: Sample) -> list[str]:
    """Notes on seeds, or repeats, that one of two samples has alone; none where they share nothing at all."""
    if not a.values.keys() & b.values.keys():
        return []
    notes = []
    for own, other in ((a, b), (b, a)):
        if alone := own.values.keys() - other.values.keys():
            verb = "has no partner in {} and is" if len(alone) == 1 else "have no partner in {} and are"
            notes.append(f"{own.name}: {_seeds_of(alone, unit_of([a, b]))} {verb.format(other.name)} left out")
    return notes


def uneven(samples: Sequence[Sample]) -> list[str]:
    """Notes on means that lack a seed, or repeats, of other means beside them."""
    known = [one for one in samples if one.values]
    keys = {key for one in known for key in one.values}
    return [f"{one.name}: its mean is without {_seeds_of(lacking, unit_of(known))}, which others have"
            for one in known if (lacking := keys - one.values.keys())]  # fmt: skip


def _seeds_of(keys: Collection[Key], unit: str) -> str:
    """seed 3; seeds 3 and 4; 2 repeats."""
    if unit == "repeat":
        return counted(len(keys), unit)
    names = [str(seed) for seed in sorted({seed for seed, _ in keys})]
    return f"{'seed' if len(names) == 1 else 'seeds'} {join_names(names)}"


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
        return [row for row in self._stored(scheme, arm) if has_ended(row)]

    def _stored(self, scheme: str, arm: str) -> list[Row]:
        name = self.canonical(scheme.partition("@")[0])
        return [row for row in self._place(scheme, arm) if row["scheme"] == name]

    def _place(self, scheme: str, arm: str) -> list[Row]:
        place = scheme.partition("@")[2] or arm
        if place not in self.rows:
            raise unknown("arm with rows", place, self.rows)
        return self.rows[place]

    def _absent(self, scheme: str, arm: str) -> str:
        """Why a scheme has no rows: the item that would have made them may have failed."""
        failed = [f"{row['scheme']} {_how([row])}" for row in self._place(scheme, arm) if row.get("item_failed")]
        return f"{scheme} has no runs" + (f": {'; '.join(dict.fromkeys(failed))}" if failed else "")

    def sample(self, scheme: str, arm: str, path: str) -> Sample:
        """A scheme's results at the rate selected by its tune runs; all results if nothing was tuned."""
        rows = self.of(scheme, arm)
        if not rows:
            return Sample(scheme, {}, [self._absent(scheme, arm)])
        standing = _standing(rows)
        judged = [row for row in rows if row.get("role", "judge") == "judge"]
        chosen = judged if standing is None else [row for row in judged if row["lr"] == standing.lr]
        if any(part.startswith(f"{_SHARED}.") for part in path.split(" / ")):
            chosen = [row for row in chosen if _SHARED in row or not is_sound(row)]
        seen = [(row, row_values(row, path) if is_sound(row) else [None]) for row in chosen]
        unit = "repeat" if any(len(values) > 1 for _, values in seen) else "seed"
        problems, notes = _problems(scheme, path, seen, unit), self._killed(scheme, arm)
        # Which loss is lower depends on the rates; what a model does inside is shown at the best of those tried.
        (problems if path == VALUE else notes).extend(_edges(scheme, standing))
        if standing is not None and (lost := lost_above_text(standing.lr, standing.tune)):
            notes.append(f"{scheme}: {lost}")
        return Sample(scheme, _by_key(seen), problems, notes, unit)

    def _killed(self, scheme: str, arm: str) -> list[str]:
        killed = sum(not has_ended(row) for row in self._stored(scheme, arm))
        verb = "was interrupted and is" if killed == 1 else "were interrupted and are"
        return [f"{scheme}: {counted(killed, 'run')} {verb} left out"] if killed else []

    def at_start(self, scheme: str, arm: str, path: str) -> Sample:
        """What was measured before training, by seed, whatever became of the run: all rates of a seed start alike."""
        rows = self.of(scheme, arm)
        found = {(row["seed"], 0): row_number(row, path) for row in reversed(rows)}
        missing = [key for key, value in found.items() if value is None]
        problems = [f"{scheme}: no {path} with {counted(len(missing), 'seed')}"] if missing else []
        return Sample(scheme, found, problems if rows else [self._absent(scheme, arm)])

    def all(self, schemes: Sequence[str], arms: Sequence[str]) -> list[Row]:
        """Every run that ended of these schemes (all if there are none) in these arms, at any rate."""
        wanted = {self.canonical(name) for name in schemes}
        rows = [row for arm in self.arms(arms) for row in self.rows[arm] if has_ended(row)]
        return [row for row in rows if not wanted or row["scheme"] in wanted]


def has_ended(row: Row) -> bool:
    """Whether a run came to an end of its own, good or bad; its process was not killed."""
    return row["state"] != "interrupted"


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


def _by_key(seen: Sequence[tuple[Row, Sequence[float | None]]]) -> dict[Key, float | None]:
    """All values by seed and repeat. A list has one for every entry, as in a repeated benchmark; no two share a key."""
    values: dict[Key, float | None] = {}
    repeats: Counter[int] = Counter()
    for row, own in seen:
        for value in own:
            values[row["seed"], repeats[row["seed"]]] = value
            repeats[row["seed"]] += 1
    return values


def _problems(scheme: str, path: str, seen: Sequence[tuple[Row, Sequence[float | None]]], unit: str) -> list[str]:
    """Reasons why these values cannot decide a claim."""
    failed = [row for row, _ in seen if not is_sound(row)]
    problems = [f"{scheme}: {len(failed)} of {len(seen)} runs {_how(failed)}"] if failed else []
    missing = sum(value is None for row, own in seen if is_sound(row) for value in own)
    if missing:
        what = counted(missing, "repeat" if unit == "repeat" else "run")
        problems.append(f"{scheme}: {what} {'has' if missing == 1 else 'have'} no {path}")
    seeds = Counter(row["seed"] for row, _ in seen)
    # Which of them would be paired with another scheme's run would be chance.
    return problems + [f"{scheme}: several rows have seed {seed}" for seed, rows in seeds.items() if rows > 1]


def _standing(rows: Sequence[Row]) -> SchemeResult | None:
    """Selected learning rate of a scheme and its edge; None for rows without rates (e.g. checks and benchmarks)."""
    if any("lr" not in row for row in rows):
        return None
    found = rank_schemes(rows, rows[0]["scheme"])[0]
    return found if found.lr is not None else None


def _edges(scheme: str, standing: SchemeResult | None) -> list[str]:
    """A note if the best rate is the largest or smallest tried: the claim would then depend on the list of rates."""
    if standing is None or standing.edge is None:
        return []
    more = f"add a {'larger' if standing.edge == 'largest' else 'smaller'} one to lrs"
    return [f"the best rate of {scheme} is {standing.edge_words} ({standing.lr:g}): {more}"]


def _how(rows: Sequence[Row]) -> str:
    kinds = [what for what in ("diverged", "stuck") if any(has(row, what) for row in rows)]
    reasons = dict.fromkeys(str(row["reason"]).splitlines()[0] for row in rows if row.get("reason"))
    return " or ".join(kinds) if kinds else f"failed ({'; '.join(reasons)})" if reasons else "failed"
