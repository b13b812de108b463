"""Parallel tokenisation: one thread reads, others parse, tokenise and hash; the order is kept.

Threads and not processes: the tokenizers package, hashing and decompression release the GIL. Threads start at once,
share one tokenizer and need no `if __name__ == "__main__"` in the user's script.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from normlab.data.readers import TextChunk
from normlab.data.sources import Source
from normlab.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20


class Encoded(NamedTuple):
    """Tokens of consecutive documents, each with an end token, and lengths, bytes and digests of the documents."""

    ids: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    digests: np.ndarray
    taken: int


class _Meter(Protocol):
    def __call__(self, taken: int, tokens: int) -> None: ...


def encode(source: Source, tokenizer: Tokenizer, *, workers: int, progress: bool) -> Generator[Encoded, None, None]:
    """Tokenise `source` in order. Only a few megabytes are in memory at a time, whatever its size."""
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool, _meter(source, progress) as meter:
        try:
            for batch in _batches(source):
                waiting.append(pool.submit(_encode, batch, tokenizer))
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


def _encode(chunks: list[TextChunk], tokenizer: Tokenizer) -> Encoded:
    ids, lengths, sizes, digests = [], [], [], []
    for document in (document for chunk in chunks for document in chunk.parse()):
        raw = document.text.encode("utf-8")
        found = tokenizer.encode(document.text)
        ids += [found, np.array([tokenizer.end], tokenizer.dtype)]
        lengths.append(len(found) + 1)
        sizes.append(len(raw))
        digests.append(int.from_bytes(hashlib.sha256(raw).digest()[:8], "big"))
    return Encoded(
        np.concatenate(ids or [np.empty(0, tokenizer.dtype)]),
        np.array(lengths, np.int64),
        np.array(sizes, np.int64),
        np.array(digests, np.uint64),
        sum(chunk.taken for chunk in chunks),
    )


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
