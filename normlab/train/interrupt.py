"""SIGTERM and Ctrl-C: the first asks for a clean stop, the second is not patient."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STDERR = 2


class Interrupt:
    """Whether this process was asked to stop, and by what."""

    def __init__(self, *, progress: bool):
        self.reason: str | None = None
        self._progress = progress

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Signals inside the block are noted; Python lets nobody but the main thread listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = f"{signal.Signals(number).name} received"
        if self._progress:
            # Not print: the signal may have come in the middle of one, and a buffer must not be entered twice.
            os.write(_STDERR, b"stopping after this step; once more to stop at once\n")
