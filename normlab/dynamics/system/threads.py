"""How many threads follow a system: small ones are left to a single one.

Threads wait for each other several times in an evaluation. Where it takes less than a millisecond they gain little on
an idle machine, and on a busy one each wait may last as long as a turn of the scheduler: hundreds of times as long as
the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SHARED = 2**23
"""Operations of an evaluation from which on threads share it: about a millisecond of one core."""
_EXPONENTIAL = 8
"""What a score costs beyond its products."""


@contextmanager
def suited(tokens: Tensor) -> Iterator[None]:
    """As many threads as suit tokens (S, n, d)."""
    systems, count, dim = tokens.shape
    before = torch.get_num_threads()
    torch.set_num_threads(before if systems * count**2 * (dim + _EXPONENTIAL) >= _SHARED else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
