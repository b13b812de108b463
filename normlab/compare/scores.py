"""Scores of a comparison's judging runs on tasks and texts (`compare --eval`), stored in DIR/evaluation.json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from normlab.compare.config import CompareConfig
from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.loop import evaluate, open_questions
from normlab.evaluation.store import Store as Scores

FILE = "evaluation.json"
"""Name of the file in the folder of a comparison."""


def check_scoring(config: CompareConfig, scoring: EvaluationConfig) -> None:
    """Raise for unknown tasks and missing texts, before anything is trained."""
    if config.base.task != "language":
        raise NormLabError(f"--eval scores runs of the task language, and this is {config.base.task}; leave it out")
    open_questions(scoring)


def score_judges(folder: Path, scoring: EvaluationConfig, *, command: Sequence[str], progress: bool = True) -> None:
    """Evaluate every judging run that has ended; what was stopped goes on. `scoring.runs` is replaced by them."""
    ended = [row["run"] for row in Store(folder).rows() if row["role"] == "judge" and row["state"] == "done"]
    # A run that is no longer there keeps the scores that it has.
    runs = [path for run in ended if (path := folder / "runs" / run).is_dir()]
    _name_lost(folder, [run for run in ended if folder / "runs" / run not in runs])
    if runs:
        asked = dataclasses.replace(scoring, runs=tuple(map(str, runs)))
        evaluate(asked, folder / FILE, command=command, progress=progress)


def _name_lost(folder: Path, gone: Sequence[str]) -> None:
    """Say in one line which runs have neither weights nor scores: rows alone travel to another machine."""
    scored = {row["run"].rpartition("/")[2] for row in Scores(folder / FILE).rows}
    if lost := [run for run in gone if run not in scored]:
        print(f"no weights in {folder / 'runs'}, so not scored: {', '.join(lost)}", file=sys.stderr, flush=True)
