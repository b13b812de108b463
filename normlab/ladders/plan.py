"""Plan of a ladder: learning-rate searches, trunks and their cooldown branches, and last the size that is forecast.

A pure function of the configuration and of the rows so far, as the plan of a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from normlab.compare.plan import PlannedRun, Role, Work, ended_runs
from normlab.compare.store import Row
from normlab.ladders.config import TUNE_SEED, LadderConfig
from normlab.ladders.rates import FoundRate, Rates
from normlab.ladders.run import LadderRun
from normlab.ladders.rung import Rung


class LadderPlan:
    """The runs of a ladder. Those of a scheme at the held-out size can start once it has a forecast."""

    def __init__(self, config: LadderConfig, forecasts: Mapping[str, str] | None = None):
        self.config = config
        self.forecasts = dict(forecasts or {})
        """Hash of the forecast of each scheme."""
        self._runs: dict[tuple[str, str, int, float, int], LadderRun] = {}
        self.rates = Rates(config, self._tune_run)

    def known_runs(self, rows: Sequence[Row]) -> list[LadderRun]:
        """All runs known so far, in the order in which they should start."""
        found = self.rates.found(rows)
        return self.rates.runs(rows) + [run for rung in self.config.rungs for run in self.judged(rung, found)]

    def judged(self, rung: Rung, found: dict[str, FoundRate]) -> list[LadderRun]:
        """Trunks and branches of a size for the schemes whose rate is known, by seed, so that pairs come early."""
        trunks = [
            self._trunk(rung, name, lr, seed)
            for seed in range(rung.seeds)
            for name in self.config.names_at(rung)
            if name in found and (lr := self.rates.rate_at(found[name], rung.size)) is not None
        ]
        return [run for trunk in trunks for run in (trunk, *self.branches(trunk))]

    def runnable(self, rows: Sequence[Row]) -> list[LadderRun]:
        """Runs that have not ended and wait for no other run."""
        ended, trained = ended_runs(rows), {row["run"] for row in rows if has_trained(row)}
        return [
            run for run in self.known_runs(rows)
            if run.name not in ended
            and (run.trunk is None or run.trunk.name in trained)
            and (run.role != "judge" or not run.rung.is_held_out or run.scheme in self.forecasts)
        ]  # fmt: skip

    def branches(self, trunk: LadderRun) -> list[LadderRun]:
        """The cooldown branches of a trunk, the longest first: it takes most time."""
        return [
            self._run("judge", trunk.rung, trunk.scheme, budget, trunk.base_lr, trunk.config.seed, trunk)
            for budget in reversed(trunk.rung.budgets[:-1])
        ]

    def dependents(self, run: PlannedRun) -> list[LadderRun]:
        """The branches of a trunk: the checkpoints that they start from are on the disk where it was trained."""
        return self.branches(run) if isinstance(run, LadderRun) and run.config.branches else []

    def set_aside(self, rows: Sequence[Row]) -> set[str]:
        """Names of judged runs in the rows that count no longer: a repeated tuning run has moved their rate."""
        known = {run.name for run in self.known_runs(rows)}
        return {row["run"] for row in rows if row["role"] == "judge" and row["run"] not in known}

    @property
    def without_forecast(self) -> list[str]:
        """Schemes that must be forecast before they are trained at the held-out size."""
        top = self.config.rungs[-1]
        return [name for name in self.config.names_at(top) if top.is_held_out and name not in self.forecasts]

    def fitted_have_ended(self, rows: Sequence[Row]) -> bool:
        """Whether every run that the forecast of the held-out size is made from has ended."""
        ended = ended_runs(rows)
        waiting = [run for run in self.known_runs(rows) if not run.rung.is_held_out and run.name not in ended]
        return not waiting and not self.is_open(rows)

    def work(self, rows: Sequence[Row]) -> Work:
        """Runs and FLOPs, in all and of those that have ended; lower bounds while rates are searched for."""
        runs, ended = self.known_runs(rows), ended_runs(rows)
        done = [run for run in runs if run.name in ended]
        whole = sum(run.work for run in runs)
        return Work(len(runs), len(done), whole, sum(run.work for run in done), self.is_open(rows))

    def is_open(self, rows: Sequence[Row]) -> bool:
        """Whether a learning-rate search has not ended, so that the number of runs is a lower bound."""
        return len(self.rates.found(rows)) < len(self.config.names)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _tune_run(self, rung: Rung, scheme: str, budget: int, lr: float, seed: int) -> LadderRun:
        return self._run("tune" if seed == TUNE_SEED else "confirm", rung, scheme, budget, lr, seed)

    def _trunk(self, rung: Rung, scheme: str, lr: float, seed: int) -> LadderRun:
        return self._run("judge", rung, scheme, rung.budgets[-1], lr, seed)

    def _run(
        self, role: Role, rung: Rung, scheme: str, budget: int, lr: float, seed: int, trunk: LadderRun | None = None
    ) -> LadderRun:
        # Cached, because the name of a run is a hash that is needed several times a second.
        key = (str(rung.size), scheme, budget, lr, seed)
        if key not in self._runs:
            config = self.config.run(rung, scheme, budget, lr, seed)
            if role == "judge" and trunk is None:
                config = dataclasses.replace(config, branches=rung.budgets[:-1])
            self._runs[key] = LadderRun(role, scheme, config, rung, lr, trunk)
        return self._runs[key]


def has_trained(row: Row) -> bool:
    """Whether a trunk went on to its end, so that its branches can be run."""
    return row["state"] == "done" and not row.get("stuck") and row.get("diverged") is None
