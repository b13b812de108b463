"""Pool: the interface of places that execute runs (processes of this machine, or a Ray cluster)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from normlab.compare.run_one import Job
from normlab.errors import NormLabError

EndedRun = tuple[Job, dict[str, Any] | NormLabError | None]
"""A run and its row; None: it was asked to stop, and has saved what it had; an error: no run can go on like this."""


class Pool(Protocol):
    """Where runs are done."""

    @property
    def running(self) -> Sequence[Job]: ...

    @property
    def is_free(self) -> bool:
        """Whether another run can start."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[EndedRun]:
        """The runs that have ended, as soon as there is one or the time is up."""
        ...

    def stop(self) -> None:
        """Ask all runs to save and end."""
        ...

    def close(self) -> None:
        """End at once whatever still runs."""
        ...
