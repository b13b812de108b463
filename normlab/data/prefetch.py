"""Work ahead: a thread that makes the next few items while the last one is used."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates `items` in a thread, at most `depth` ahead. What goes wrong there is raised here, in its turn."""

    def __init__(self, items: Iterator[Item], depth: int):
        self._ready: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        arguments = (items, self._ready, self._stop)
        self._thread = threading.Thread(target=_produce, args=arguments, name="prefetch", daemon=True)
        # The thread knows nothing of this object: one that is forgotten unclosed still ends it.
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """End the thread and forget what it made."""
        self._stop.set()
        # Room for what it may be waiting to hand over.
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()


def _produce(items: Iterator[Item], ready: queue.Queue[Item | BaseException], stop: threading.Event) -> None:
    try:
        for item in items:
            if not _put(item, ready, stop):
                return
        raise StopIteration
    except BaseException as error:
        _put(error, ready, stop)


def _put(item: Item | BaseException, ready: queue.Queue[Item | BaseException], stop: threading.Event) -> bool:
    """Wait for room; False if nobody wants it any more."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
