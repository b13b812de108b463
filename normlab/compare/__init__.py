"""Compare schemes: plan a grid of training runs, run them in parallel, store their results, rank the schemes.

config = CompareConfig(base=TrainConfig.preset("tiny"), schemes=("pre", "peri"), seeds=3)
standings = compare(config, "runs/first")   # can be stopped at any time; the same call resumes it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.compare.comparison import compare
    from normlab.compare.config import CompareConfig

__all__ = ["CompareConfig", "compare"]

__getattr__ = loader(__name__, {"CompareConfig": "config", "compare": "comparison"})
