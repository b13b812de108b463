"""Checks of a run's configuration that concern its schedule: warm-up and branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.errors import NormLabError

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig


def check_warmup(warmup: float, steps: int) -> None:
    """Raise unless `warmup` is a share of the steps, or a whole number of them above 1."""
    is_share, is_count = 0.0 <= warmup <= 1.0, warmup > 1.0 and float(warmup).is_integer()
    if not (is_share or is_count):
        raise NormLabError(
            f"warmup must lie in [0, 1], a share of the steps, or be a whole number of steps above 1, got {warmup:g}; "
            f"try 0.05 or 100"
        )
    if is_count and warmup > steps:
        raise NormLabError(f"warmup is {warmup:g} steps and the run has {steps:,}; lower warmup")


def check_branches(config: TrainConfig) -> None:
    """Raise for a trunk whose branches would not be the runs that had their budgets from the start."""
    if config.branches and config.trouble == "rollback":
        raise NormLabError(
            "trouble rollback goes back to the newest checkpoint, so the run depends on its checkpoints and has no "
            "branches; try skip"
        )
    own = getattr(config, config.budget)
    for budget in config.branches:
        if not 0 < budget < own:
            raise NormLabError(f"a branch has fewer {config.budget} than its trunk, {own:,}; got {budget:,}")
        branch = config.branch(budget)
        if branch.warmup_steps != config.warmup_steps:
            raise NormLabError(
                f"warmup {config.warmup:g} is a share of the steps, so the branches would need another one than the "
                f"trunk; give it in steps, e.g. {max(2, config.warmup_steps)}"
            )
        branch.branch_step  # noqa: B018  # raises for a schedule that decays from its start
