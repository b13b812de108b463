"""`Prefetch`: iterate in a background thread, a few items ahead."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates over `items` in a thread, at most `depth` items ahead. Exceptions are raised in the consumer."""

    def __init__(self, items: Iterator[Item], depth: int):
        self._ready: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        arguments = (items, self._ready, self._stop)
        self._thread = threading.Thread(target=_produce, args=arguments, name="prefetch", daemon=True)
        # The thread holds no reference to this object, so it also ends if the object is garbage-collected unclosed.
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
        """Stop the thread and discard prepared items."""
        self._stop.set()
        # Make room, because the thread may be waiting to put an item.
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
    """Put an item into the queue, waiting for room; False if stopped."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
