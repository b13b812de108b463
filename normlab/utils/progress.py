"""How long work shows how it gets on: bars on a terminal, else a line now and then, always on standard error."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn

_PLAIN_SECONDS = 30.0
"""Between two lines where nobody watches a terminal."""


class ProgressDisplay:
    """Bars made of `columns` where there is a terminal; nothing at all where `progress` is off."""

    def __init__(self, *columns: ProgressColumn, progress: bool):
        self.progress, self._said = progress, time.perf_counter()
        self.bar = Progress(*columns, console=Console(stderr=True)) if progress and sys.stderr.isatty() else None
        if self.bar is not None:
            self.bar.start()

    @property
    def is_due(self) -> bool:
        """Whether it is time for another plain line."""
        return self.progress and self.bar is None and time.perf_counter() - self._said > _PLAIN_SECONDS

    def say(self, text: str) -> None:
        """A line of its own, above the bars."""
        self._said = time.perf_counter()
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.progress:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
