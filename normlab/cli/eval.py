"""The command `normlab eval`. Importing this does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro


def evaluate(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = (),
    /,
    tasks: tuple[str, ...] = (),
    task_files: tuple[Path, ...] = (),
    allow_code: bool = False,
    choices: tuple[str, ...] = (),
    bits: tuple[str, ...] = (),
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    device: str = "auto",
    out: Path = Path("evaluation.json"),
) -> None:
    """Evaluate trained models: tasks of lm-evaluation-harness, and bits per byte of any text.

    Each score is stored as it comes; the same command again goes on where it was stopped.

    For example:
      normlab eval runs/peri runs/pre --tasks hellaswag,arc_easy
      normlab eval runs/peri --task-files cloze.yaml --limit 100
      normlab eval runs/peri runs/pre --bits book.txt

    Args:
        runs: Folders of runs, or folders that normlab export wrote.
        tasks: Tasks, groups or tags of lm-evaluation-harness, separated by commas or spaces; none: all of --task-files.
        task_files: YAML files of tasks of your own, or folders of some.
        allow_code: Let --task-files run Python code (!function and the like).
        choices: Files of multiple-choice questions, JSON lines; they need no lm-evaluation-harness.
        bits: Texts for bits per byte: files, folders, globs, hf:NAME, as in normlab train --data.
        length: Tokens in a window of --bits; none: the training length of a run, the longest that an export takes.
        stride: Tokens between windows of --bits; none: half a window; equal to --length: contiguous windows.
        limit: Questions of each task or file, the first ones; none: all.
        batch: Sequences in a batch.
        device: Device: auto, cpu, cuda.
        out: JSON file of the scores; those of other commands stay in it.
    """
    from normlab.evaluation import EvaluationConfig
    from normlab.evaluation import evaluate as evaluate_runs
    from normlab.evaluation.terminal import print_rows

    config = EvaluationConfig(
        runs=tuple(map(str, runs)), tasks=task_names(tasks), task_files=tuple(map(str, task_files)),
        allow_code=allow_code, choices=choices, bits=bits, length=length, stride=stride, limit=limit, batch=batch,
        device=device,
    )  # fmt: skip
    rows = evaluate_runs(config, out, command=["normlab", *sys.argv[1:]])
    print_rows(rows)
    print(f"scores: {out}")


def task_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas or spaces."""
    return tuple(name.strip() for word in words for name in word.split(",") if name.strip())
