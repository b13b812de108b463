"""Plan of a comparison: its runs (`tune` and `judge`), and which can start, given those that have ended.

With listed rates all tune runs are known at the start. Where rates are searched for (`lrs="auto"`, or a list with
`widen_rates`) each scheme's next tune runs depend on the earlier results, so the number of runs is a lower bound until
every scheme has its rate (`is_open`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from normlab.compare.config import FIRST_TUNE_SEED, CompareConfig
from normlab.compare.tuning import RateResults, group_by_rate, pick_rate
from normlab.train.config import TrainConfig

Row = Mapping[str, Any]
Role = Literal["tune", "confirm", "judge"]


@dataclass(frozen=True)
class PlannedRun:
    """A run and its role: `tune` runs select a scheme's learning rate, `judge` runs measure the scheme at that rate."""

    role: Role
    scheme: str
    config: TrainConfig

    @cached_property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return self.config.name

    @property
    def work(self) -> float:
        """Cost of the run, in a unit that all runs of its plan share."""
        return self.config.steps

    @property
    def first_step(self) -> int:
        """Step at which the run begins, where those that it depends on have left it their state."""
        return 0

    def work_until(self, step: int) -> float:
        """Cost of the run up to a step."""
        return self.work * step / self.config.steps

    def __str__(self) -> str:
        return f"{self.scheme}, rate {self.config.lr:g}, seed {self.config.seed} ({self.role})"


@dataclass(frozen=True)
class Work:
    """Progress of a plan: runs and their work, in all and of those that have ended."""

    runs: int
    ended: int
    whole: float
    done: float
    is_open: bool = False
    """Whether `runs` and `whole` are lower bounds, because a learning-rate search has not ended."""

    def __str__(self) -> str:
        return f"{self.ended} of {'at least ' if self.is_open else ''}{self.runs} runs"


class Plan:
    """The runs of a comparison, as a function of its configuration and of the rows so far.

    Interrupted runs count as not ended.
    """

    def __init__(self, config: CompareConfig):
        self.config = config
        self._seeds = range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + config.tune_seeds)
        self._runs: dict[tuple[str, float, int], PlannedRun] = {}

    def tune(self, rows: Sequence[Row] = ()) -> list[PlannedRun]:
        """All tune runs known from these rows, including those that have ended."""
        if not self._is_tuned:
            return []
        searched = self._searched(rows)
        return [run for scheme in self.config.names for run in self._tune_runs(scheme, self._wanted(searched[scheme]))]

    def dependents(self, run: PlannedRun) -> list[PlannedRun]:
        """The runs that need what a run leaves on disk."""
        return []

    def rates(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """The rate of each scheme whose tune runs have all ended; None if all of them failed."""
        if not self._is_tuned:
            return dict.fromkeys(self.config.names, self.config.first_rates[0])
        metric, searched = self.config.base.task_object.metric, self._searched(rows)
        ready = [scheme for scheme, own in searched.items() if set(self._wanted(own)) == own.keys()]
        return {scheme: pick_rate(searched[scheme], metric) for scheme in ready}

    def known_runs(self, rows: Sequence[Row]) -> list[PlannedRun]:
        """All runs known so far, in the order in which they should start.

        Judge runs are ordered by seed, so that an interrupted comparison has pairs.
        """
        judged = [self.judge(scheme, lr) for scheme, lr in self.rates(rows).items() if lr is not None]
        return self.tune(rows) + [run for of_seed in zip(*judged, strict=True) for run in of_seed]

    def runnable(self, rows: Sequence[Row]) -> list[PlannedRun]:
        """Runs that have not ended and depend on no other run."""
        ended = ended_runs(rows)
        return [run for run in self.known_runs(rows) if run.name not in ended]

    def size(self, rows: Sequence[Row]) -> int:
        """Number of runs, or a lower bound (`is_open`); a scheme without a rate has no judge runs."""
        rates = self.rates(rows)
        judged = [scheme for scheme in self.config.names if rates.get(scheme, 0.0) is not None]
        return len(self.tune(rows)) + len(judged) * self.config.seeds

    def is_open(self, rows: Sequence[Row]) -> bool:
        """Whether `size` is a lower bound, because a learning-rate search has not ended."""
        return self.config.bracket is not None and len(self.rates(rows)) < len(self.config.names)

    def left(self, rows: Sequence[Row]) -> int:
        """Number of runs that have not ended."""
        ended = ended_runs(rows)
        return self.size(rows) - sum(run.name in ended for run in self.known_runs(rows))

    def work(self, rows: Sequence[Row]) -> Work:
        """Runs and work, in all and of those that have ended."""
        runs, steps = self.size(rows), self.config.base.steps
        ended = runs - self.left(rows)
        return Work(runs, ended, runs * steps, ended * steps, self.is_open(rows))

    def judge(self, scheme: str, lr: float) -> list[PlannedRun]:
        """The judge runs of a scheme at a rate."""
        return [self._run("judge", scheme, lr, seed) for seed in range(self.config.seeds)]

    @property
    def _is_tuned(self) -> bool:
        return len(self.config.first_rates) > 1

    def _wanted(self, own: Mapping[float, RateResults]) -> list[float]:
        """Rates to run for a scheme, given the results at rates where all seeds have ended."""
        if self.config.bracket is None:
            return list(self.config.first_rates)
        metric = self.config.base.task_object.metric
        return [*own, *self.config.bracket.next({lr: at_rate.score(metric) for lr, at_rate in own.items()}).next_rates]

    def _searched(self, rows: Sequence[Row]) -> dict[str, dict[float, RateResults]]:
        """Results by scheme and rate, for the rates at which all tune runs have ended, in ascending order."""
        own: dict[str, list[Row]] = {scheme: [] for scheme in self.config.names}
        for row in rows:
            if self._has_tuned(row):
                own[row["scheme"]].append(row)
        whole = {scheme: group_by_rate(tuned, "tune") for scheme, tuned in own.items()}
        return {
            scheme: {lr: found[lr] for lr in sorted(found) if len(found[lr].values) == self.config.tune_seeds}
            for scheme, found in whole.items()
        }

    def _has_tuned(self, row: Row) -> bool:
        """Whether a row belongs to one of this comparison's tune runs."""
        scheme, lr, seed = row["scheme"], row["lr"], row["seed"]
        if row["role"] != "tune" or scheme not in self.config.names or seed not in self._seeds:
            return False
        search = self.config.bracket
        is_rate = lr in self.config.first_rates if search is None else search.may_try(lr)
        return is_rate and row["run"] == self._run("tune", scheme, lr, seed).name

    def _tune_runs(self, scheme: str, rates: Iterable[float]) -> list[PlannedRun]:
        return [self._run("tune", scheme, lr, seed) for lr in rates for seed in self._seeds]

    def _run(self, role: Role, scheme: str, lr: float, seed: int) -> PlannedRun:
        # Seeds determine the role. Cached, because the name of a run is a hash that is needed several times a second.
        key = (scheme, lr, seed)
        if key not in self._runs:
            self._runs[key] = PlannedRun(role, scheme, self.config.run(scheme, lr, seed))
        return self._runs[key]


def ended_runs(rows: Iterable[Row]) -> set[str]:
    """Names of the runs that have ended; those whose process was killed have not."""
    return {row["run"] for row in rows if row["state"] != "interrupted"}
