"""Progress display of a check: the current work and, on a terminal, its elapsed time."""

from __future__ import annotations

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from normlab.utils.progress import ProgressDisplay


class CheckProgress:
    """Progress display: the current work and, on a terminal, its elapsed time."""

    def __init__(self, name: str, *, progress: bool):
        self._name = name
        text = TextColumn("{task.description}", markup=False)
        self._live = ProgressDisplay(SpinnerColumn(), text, TimeElapsedColumn(), progress=progress)
        self._task = None if self._live.bar is None else self._live.bar.add_task(name, total=None)

    def __call__(self, what: str) -> None:
        line = f"{self._name}: {what}"
        if self._live.bar is not None and self._task is not None:
            self._live.bar.update(self._task, description=line)
        elif self._live.is_due:
            self._live.say(line)

    def __enter__(self) -> CheckProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live.bar is not None and self._task is not None:
            self._live.bar.remove_task(self._task)
        self._live.close()
