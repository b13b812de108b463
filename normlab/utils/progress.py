"""Progress display on standard error: bars on a terminal, a plain line every 30 s elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn

_PLAIN_SECONDS = 30.0
"""Seconds between two plain lines."""


class ProgressDisplay:
    """Progress bars made of `columns` if there is a terminal; nothing if `progress` is off."""

    def __init__(self, *columns: ProgressColumn, progress: bool):
        self.progress, self._said = progress, time.perf_counter()
        self.bar = Progress(*columns, console=Console(stderr=True)) if progress and sys.stderr.isatty() else None
        if self.bar is not None:
            self.bar.start()

    @property
    def is_due(self) -> bool:
        """Whether the next plain line is due."""
        return self.progress and self.bar is None and time.perf_counter() - self._said > _PLAIN_SECONDS

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        self._said = time.perf_counter()
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.progress:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the bars."""
        if self.bar is not None:
            self.bar.stop()
