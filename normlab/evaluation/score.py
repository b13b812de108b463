"""`Score`: one number of an evaluation, with its standard error."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.evaluation.groups import Groups


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one model on one task or text."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """Standard error over questions or windows, not over training seeds; None where it is not defined."""
    samples: int | None
    """Number of questions or windows."""
    group_stderr: float | None = None
    """Standard error over groups of questions, where the task names some (`group_by` in its metadata)."""
    groups: Groups | None = None
    """Mean and number of questions of every group."""
