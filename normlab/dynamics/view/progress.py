"""How far a simulation is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from normlab.utils.progress import ProgressDisplay


class Progress:
    """A bar. Calling it tells what is being done, and the share of all work that is done."""

    def __init__(self, *, progress: bool):
        text = TextColumn("{task.description}", markup=False)
        self._live = ProgressDisplay(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), progress=progress)
        self._bar = None if self._live.bar is None else self._live.bar.add_task("simulate", total=1.0)

    def __call__(self, what: str, share: float) -> None:
        if self._live.bar is not None and self._bar is not None:
            self._live.bar.update(self._bar, description=what, completed=share)
        elif self._live.is_due:
            self._live.say(f"{what}: {share:.0%}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.close()
