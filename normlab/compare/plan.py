"""The runs of a comparison: which there are, and which can start, given those that have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from normlab.compare.config import FIRST_TUNE_SEED, CompareConfig
from normlab.compare.statistics import ranking
from normlab.train.config import TrainConfig

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Planned:
    """A run, and what it is for: `tune` runs pick a scheme's rate, `judge` runs say what it reaches there."""

    role: Literal["tune", "judge"]
    scheme: str
    config: TrainConfig

    @cached_property
    def name(self) -> str:
        """Of the run and of its folder."""
        return self.config.name

    def __str__(self) -> str:
        return f"{self.scheme}, rate {self.config.lr:g}, seed {self.config.seed} ({self.role})"


class Plan:
    """Which runs a comparison has follows from its configuration and from the rows so far, and from nothing else."""

    def __init__(self, config: CompareConfig):
        self.config = config
        self.tune = self._tune_runs()
        self._judge: dict[tuple[str, float], list[Planned]] = {}

    def rates(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """The rate of each scheme whose tune runs have all ended; None where all of them failed."""
        if len(self.config.lrs) == 1:
            return dict.fromkeys(self.config.names, self.config.lrs[0])
        names = {run.name for run in self.tune}
        tuned = [row for row in rows if row["run"] in names]
        per_scheme = {name: [row for row in tuned if row["scheme"] == name] for name in self.config.names}
        needed = len(self.config.lrs) * self.config.tune_seeds
        # Judged against itself: all that is asked for is the rate.
        return {name: ranking(own, name)[0].lr for name, own in per_scheme.items() if len(own) == needed}

    def known(self, rows: Sequence[Row]) -> list[Planned]:
        """All runs that are certain so far, in the order in which they should start.

        Judge runs go seed by seed, so that what is there after a stop is paired.
        """
        judged = [self.judge(scheme, lr) for scheme, lr in self.rates(rows).items() if lr is not None]
        return self.tune + [run for of_seed in zip(*judged, strict=True) for run in of_seed]

    def due(self, rows: Sequence[Row]) -> list[Planned]:
        """The runs that have not ended and that nothing else must end for."""
        ended = {row["run"] for row in rows}
        return [run for run in self.known(rows) if run.name not in ended]

    def size(self, rows: Sequence[Row]) -> int:
        """How many runs there will be; a scheme without a rate is not judged."""
        rates = self.rates(rows)
        judged = [scheme for scheme in self.config.names if rates.get(scheme, 0.0) is not None]
        return len(self.tune) + len(judged) * self.config.seeds

    def left(self, rows: Sequence[Row]) -> int:
        """How many of them have not ended."""
        ended = {row["run"] for row in rows}
        return self.size(rows) - sum(run.name in ended for run in self.known(rows))

    def judge(self, scheme: str, lr: float) -> list[Planned]:
        """The runs that judge a scheme at a rate."""
        if (scheme, lr) not in self._judge:
            seeds = range(self.config.seeds)
            self._judge[scheme, lr] = [Planned("judge", scheme, self.config.run(scheme, lr, seed)) for seed in seeds]
        return self._judge[scheme, lr]

    def _tune_runs(self) -> list[Planned]:
        config = self.config
        if len(config.lrs) == 1:
            return []
        seeds = range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + config.tune_seeds)
        return [
            Planned("tune", scheme, config.run(scheme, lr, seed))
            for scheme in config.names for lr in config.lrs for seed in seeds
        ]  # fmt: skip
