"""Parallel tokenisation: one thread reads, others parse, tokenise and hash; the order is kept.

Threads start at once, share one tokenizer and need no `if __name__ == "__main__"` in the user's script. Of many files
each thread has a process of its own (`encode_process.py`), since threads of one process wait for each other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from normlab.data.encode_process import EncodeProcess
from normlab.data.encoded import Encoded, encode_batch
from normlab.data.readers import TextChunk
from normlab.data.sources import Source
from normlab.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20

_PROCESS_BYTES = 1 << 22
"""Bytes of files that are worth a process: it starts in less time than these take."""

_Encode = Callable[[list[TextChunk]], Encoded]


class _Meter(Protocol):
    def __call__(self, taken: int, tokens: int) -> None: ...


def encode(source: Source, tokenizer: Tokenizer, *, workers: int, progress: bool) -> Generator[Encoded, None, None]:
    """Tokenise `source` in order. Only a few megabytes are in memory at a time, whatever its size."""
    waiting: deque[Future[Encoded]] = deque()
    # The threads end before their processes do.
    with (
        _encoder(tokenizer, min(workers, source.size() // _PROCESS_BYTES)) as encoded,
        ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool,
        _meter(source, progress) as meter,
    ):
        try:
            for batch in _batches(source):
                waiting.append(pool.submit(encoded, batch))
                if len(waiting) > 2 * workers:
                    yield _count(waiting.popleft().result(), meter)
            while waiting:
                yield _count(waiting.popleft().result(), meter)
        finally:
            # After an error the rest is not needed.
            for future in waiting:
                future.cancel()


def _count(found: Encoded, meter: _Meter) -> Encoded:
    meter(found.taken, len(found.ids))
    return found


def _batches(source: Source) -> Iterator[list[TextChunk]]:
    """Group chunks of small files, so that a batch is worth a task for a thread."""
    batch: list[TextChunk] = []
    for chunk in source.chunks():
        batch.append(chunk)
        if sum(chunk.size for chunk in batch) >= _BATCH_BYTES or len(batch) == 64:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _encoder(tokenizer: Tokenizer, processes: int) -> Iterator[_Encode]:
    """What a thread calls with a batch: the function itself, or the process that belongs to the thread."""
    if processes < 2:
        yield lambda batch: encode_batch(batch, tokenizer)
        return
    mine, started = threading.local(), []

    def encoded(batch: list[TextChunk]) -> Encoded:
        if not hasattr(mine, "process"):
            mine.process = EncodeProcess(tokenizer)
            started.append(mine.process)
        return mine.process.encode(batch)

    try:
        yield encoded
    finally:
        for process in started:
            process.close()


@contextmanager
def _meter(source: Source, progress: bool) -> Iterator[_Meter]:
    """A progress bar if standard error is a terminal, else one line at the start and one at the end."""
    if not progress:
        yield lambda taken, tokens: None
        return
    console, began, total = Console(stderr=True), time.monotonic(), 0
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[tokens]:,} tokens"),
    )
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=source.size() or None, tokens=0)

        def advance(taken: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            bar.update(task, advance=taken, tokens=total)

        if not console.is_terminal:
            print(f"tokenising {source.describe()}", file=sys.stderr)
        yield advance
    print(f"tokenised {source.describe()}: {total:,} tokens in {time.monotonic() - began:.1f} s", file=sys.stderr)
