"""How long work shows how it gets on: bars on a terminal, else a line now and then, always on standard error."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn

_PLAIN_SECONDS = 30.0
"""Between two lines where nobody watches a terminal."""


class Live:
    """Bars made of `columns` where there is a terminal; nothing at all where `shown` is off."""

    def __init__(self, *columns: ProgressColumn, shown: bool):
        self.shown, self._said = shown, time.perf_counter()
        self.bar = Progress(*columns, console=Console(stderr=True)) if shown and sys.stderr.isatty() else None
        if self.bar is not None:
            self.bar.start()

    @property
    def is_due(self) -> bool:
        """Whether it is time for another plain line."""
        return self.shown and self.bar is None and time.perf_counter() - self._said > _PLAIN_SECONDS

    def say(self, text: str) -> None:
        """A line of its own, above the bars."""
        self._said = time.perf_counter()
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
