"""Scores of a comparison's judging runs on tasks and texts (`compare --eval`), stored in DIR/evaluation.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from normlab.compare.config import CompareConfig
from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.loop import evaluate, open_questions

FILE = "evaluation.json"
"""Name of the file in the folder of a comparison."""


def check_scoring(config: CompareConfig, scoring: EvaluationConfig) -> None:
    """Raise for unknown tasks and missing texts, before anything is trained."""
    if config.base.task != "language":
        raise NormLabError(f"--eval scores runs of the task language, and this is {config.base.task}; leave it out")
    open_questions(scoring)


def score_judges(folder: Path, scoring: EvaluationConfig, *, command: Sequence[str], progress: bool = True) -> None:
    """Evaluate every judging run that has ended; what was stopped goes on. `scoring.runs` is replaced by them."""
    ended = [row for row in Store(folder).rows() if row["role"] == "judge" and row["state"] == "done"]
    # A run that is no longer there keeps the scores that it has.
    runs = [path for row in ended if (path := folder / "runs" / row["run"]).is_dir()]
    if runs:
        asked = dataclasses.replace(scoring, runs=tuple(map(str, runs)))
        evaluate(asked, folder / FILE, command=command, progress=progress)
