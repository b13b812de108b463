"""Signal handling: the first SIGTERM or Ctrl-C stops a run after its step, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STDERR = 2


class Interrupt:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self, *, progress: bool):
        self.reason: str | None = None
        self._progress = progress

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle signals inside the block; only in the main thread, where Python allows it."""
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
            # Not print: the signal may have interrupted one, and its buffer is not reentrant.
            os.write(_STDERR, b"stopping after this step; once more to stop at once\n")
