"""Evaluation of trained models: tasks of lm-evaluation-harness, and bits per byte of any text.

config = EvaluationConfig(runs=("runs/peri",), bits=("book.txt",))
rows = evaluate(config, "evaluation.json")   # can be stopped at any time; the same call goes on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.evaluation.config import EvaluationConfig
    from normlab.evaluation.loop import evaluate
    from normlab.evaluation.score import Score

__all__ = ["EvaluationConfig", "Score", "evaluate"]

__getattr__ = loader(__name__, {"EvaluationConfig": "config", "Score": "score", "evaluate": "loop"})
