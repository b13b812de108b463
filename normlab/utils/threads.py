"""Run small CPU operations on one thread: waking the others takes longer than the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(*, when: bool = True) -> Iterator[None]:
    """Limit torch to one thread within this context; if not `when`, keep the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if when else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
