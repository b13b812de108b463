"""Configuration of an evaluation: runs, tasks, texts, limits."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.errors import NormLabError, advice_for


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is evaluated on what."""

    runs: tuple[str, ...]
    """Folders of runs, or folders that `normlab export` wrote."""
    tasks: tuple[str, ...] = ()
    """Names of tasks, groups or tags of lm-evaluation-harness; with `task_files` none means all tasks in those."""
    task_files: tuple[str, ...] = ()
    """YAML files of tasks, or folders of some."""
    allow_code: bool = False
    """Whether `task_files` may run Python code."""
    choices: tuple[str, ...] = ()
    """Files of multiple-choice questions (JSON lines), which need no lm-evaluation-harness."""
    bits: tuple[str, ...] = ()
    """Texts whose bits per byte are measured: sources as in training."""
    length: int | None = None
    """Tokens in a window of a text; None: the run's training length, or the longest that an export takes."""
    stride: int | None = None
    """Tokens between the starts of two windows; None: half a window. As long as a window: contiguous windows."""
    limit: int | None = None
    """Questions of each task or file, the first ones; None: all."""
    batch: int = 8
    """Sequences in a batch."""
    device: str = "auto"
    """Device: auto, cpu, cuda."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise NormLabError("no run given; expected folders of runs or exports, e.g. normlab eval runs/peri")
        if not (self.tasks or self.task_files or self.choices or self.bits):
            raise NormLabError("nothing to evaluate on; try --tasks hellaswag,arc_easy or --bits book.txt")
        for name in ("length", "stride", "limit", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise NormLabError(f"{name} must be at least 1, got {value}; {advice_for(self, name)}")
