"""LadderRun: one planned run of a ladder, which finds a learning rate, is a trunk, or a cooldown branch of a trunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normlab.compare.plan import PlannedRun
from normlab.ladders.rung import Rung
from normlab.ladders.statistics.answer import place_name


@dataclass(frozen=True)
class LadderRun(PlannedRun):
    """A run and its place on the ladder."""

    rung: Rung
    base_lr: float
    """Learning rate at the batch size of the smallest rung; that of the run is larger by the square root of its batch
    ratio."""
    trunk: LadderRun | None = None
    """For a branch: the run it branches off."""

    @cached_property
    def flops_per_token(self) -> int:
        return self.config.model.flops_per_token(self.config.sequence)

    @property
    def work(self) -> float:
        """FLOPs of the run; a branch trains on the steps of its decay alone."""
        return self.flops_per_token * self.tokens * (1.0 - self.first_step / self.config.steps)

    @property
    def first_step(self) -> int:
        """Step at which the run begins: 0, or where it branches off its trunk."""
        return self.config.branch_step if self.trunk is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens of a run of this budget from its first step on."""
        return self.config.tokens_in_all

    def work_until(self, step: int) -> float:
        steps = self.config.steps - self.first_step
        return self.work * max(0, step - self.first_step) / steps

    def facts(self) -> Mapping[str, Any]:
        """Fields that the row of a run has on a ladder, besides those of every training run."""
        whole = self.trunk or self
        return {
            "size": str(self.rung.size), "parameters": self.config.model.num_params(), "budget": self.tokens,
            "flops": float(self.flops_per_token * self.tokens), "base_lr": self.base_lr, "trunk": whole.name,
            "planned_steps": self.config.steps,
        }  # fmt: skip

    def __str__(self) -> str:
        kind = "branch" if self.trunk is not None else self.role
        where = place_name(str(self.rung.size), self.tokens)
        return f"{self.scheme} {where}, rate {self.config.lr:.3g}, seed {self.config.seed} ({kind})"
