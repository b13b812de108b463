"""Ladders of models so small that a run takes a second, and rows of runs that nobody has trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normlab.ladders.config import LadderConfig
from normlab.ladders.plan import LadderPlan
from normlab.ladders.run import LadderRun
from tests.compare import small
from tests.compare.small import BATCH, LENGTH

STEP = LENGTH * BATCH
"""Tokens of one optimiser step."""


def configuration(text: str | Path = "text", *, of_base: dict[str, Any] | None = None, **changes: Any) -> LadderConfig:
    known: dict[str, Any] = {
        "schemes": ("pre", "peri"), "sizes": ("1x8", "1x16", "2x16"), "budgets": (10 * STEP, 20 * STEP), "seeds": 2,
        "warmup_steps": 2, "head_width": 8, "lrs": (1e-2,), "workers": 1, "epochs": 100.0,
    }  # fmt: skip
    base = small.base(text, **({"saves": 0, "evals": 1} | (of_base or {})))
    return LadderConfig(base=base, **(known | changes))


Loss = Callable[[LadderRun], float | None]


def row(run: LadderRun, loss: float | None, **changes: Any) -> dict[str, Any]:
    """The row that a run would have stored; no loss: it failed."""
    state = "done" if loss is not None else "failed"
    known = {
        "run": run.name, "scheme": run.scheme, "label": run.scheme, "lr": run.config.lr, "seed": run.config.seed,
        "role": run.role, "state": state, "reason": None, "metric": "val_loss", "value": loss, "loss": loss,
        "tokens": run.tokens, "steps": run.config.steps, "seconds": 1.0, "tokens_per_s": 1e3, "peak_bytes": None,
        "device": "cpu", "versions": {}, "config": {}, "started": "2026-01-02T00:00:00+00:00",
        "finished": "2026-01-02T00:01:00+00:00",
    }  # fmt: skip
    return {**known, **run.facts(), **changes}


def trained(plan: LadderPlan, loss: Loss, rows: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The rows after everything that can run has run."""
    ended = list(rows)
    while runnable := plan.runnable(ended):
        ended += [row(run, loss(run)) for run in runnable]
    return ended
