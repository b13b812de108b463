"""Progress of a simulation: the callback that experiments report to, and a progress bar on the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from normlab.utils.progress import ProgressDisplay

ProgressCallback = Callable[[str, float], None]
"""Called with a description of the current work and the fraction of all work that is done."""


def no_progress(what: str, share: float) -> None:
    """Report nothing."""


def subtask(tell: ProgressCallback, place: int, count: int) -> ProgressCallback:
    """A callback for part `place` of `count` equal parts of the work."""
    return lambda what, share: tell(what, (place + share) / count)


class ProgressBar:
    """A progress bar, or a line of text every few seconds where the output is no terminal. Call it to update."""

    def __init__(self, *, progress: bool):
        text = TextColumn("{task.description}", markup=False)
        self._live = ProgressDisplay(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), progress=progress)
        self._bar = None if self._live.bar is None else self._live.bar.add_task("simulate", total=1.0)

    def __call__(self, what: str, share: float) -> None:
        if self._live.bar is not None and self._bar is not None:
            self._live.bar.update(self._bar, description=what, completed=share)
        elif self._live.is_due:
            self._live.say(f"{what}: {share:.0%}")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.close()
