"""`HiddenState`: a tensor of hidden states with the intermediate results that its measures share, cached.

A state has tokens in its last but one dimension and channels in its last: (..., T, D).

- Half precision is widened before anything is squared, and squares are taken of h / max|h|: squares of fp16 overflow
  above 255, and those of fp32 above 2·10¹⁹.
- Entries that are NaN or infinite become zero and are not counted; tokens that hold one are not `whole`.
- Nothing here waits for the device. Masks are numbers, one for each token, that entries are multiplied with: a CPU is
  slow at comparing and selecting single entries.
"""

from __future__ import annotations

import functools
from functools import cached_property

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.norms import widen

TOKENS = 4096
"""Largest number of tokens of a state that are measured."""

_PER_SEQUENCE = 64
"""Smallest number of tokens kept of each sequence, for measures within a sequence."""

_ROUNDINGS = 16
"""Least distance from the mean of all tokens, in units of a token's rounding error."""


class HiddenState:
    """Hidden states (..., T, D) of tokens."""

    def __init__(self, h: Tensor):
        self.raw = widen(h.detach())

    @property
    def shape(self) -> torch.Size:
        return self.raw.shape

    @property
    def device(self) -> torch.device:
        return self.raw.device

    @staticmethod
    def of(h: Tensor | HiddenState) -> HiddenState:
        return h if isinstance(h, HiddenState) else HiddenState(h)

    @cached_property
    def clean(self) -> Tensor:
        """The state with zero for entries that are not finite."""
        return torch.nan_to_num(self.raw, nan=0.0, posinf=0.0, neginf=0.0)

    @cached_property
    def bad(self) -> Tensor:
        """(tokens,) number of entries that are not finite."""
        return (self.raw != self.clean).reshape(-1, self._width).sum(-1)

    @cached_property
    def count(self) -> Tensor:
        """Number of finite entries."""
        return self.raw.numel() - self.bad.sum()

    @cached_property
    def whole(self) -> Tensor:
        """(tokens,) 1 for a token whose entries are all finite, else 0."""
        return (self.bad == 0).to(self.raw.dtype)

    @cached_property
    def wholes(self) -> Tensor:
        """Number of tokens whose entries are all finite."""
        return self.whole.sum()

    @cached_property
    def scale(self) -> Tensor:
        """max|h|; 0 for a state without entries."""
        return self.clean.abs().amax() if self.clean.numel() else self.clean.new_zeros(())

    @cached_property
    def scaled(self) -> Tensor:
        """(tokens, D) h / max|h|."""
        return (self.clean / nonzero(self.scale)).reshape(-1, self._width)

    @cached_property
    def squares(self) -> Tensor:
        """(tokens, D) scaled²."""
        return self.scaled.square()

    @cached_property
    def tokens(self) -> Tensor:
        """(tokens, D) `scaled`, zero for tokens that are not whole."""
        return self.scaled * self.whole[:, None]

    @cached_property
    def lengths(self) -> Tensor:
        """(tokens,) ‖scaled token‖; 0 for tokens that are not whole."""
        return self.squares.sum(-1).sqrt() * self.whole

    @cached_property
    def present(self) -> Tensor:
        """(tokens,) 1 for a token with a direction, else 0."""
        return (self.lengths > 0).to(self.raw.dtype)

    @cached_property
    def directions(self) -> Tensor:
        """(tokens, D) unit tokens; zero without a direction."""
        return self.scaled * (self.present / nonzero(self.lengths))[:, None]

    @cached_property
    def rest(self) -> HiddenState:
        """Tokens minus the mean of all tokens, in units of max|h|; zero if not whole, or if only rounding is left.

        The mean of tokens that are all the same is not quite that token: what is left has a direction, of no meaning.
        """
        apart = self.tokens - self.tokens.sum(0) / nonzero(self.wholes)
        known = apart.square().sum(-1).sqrt() > _ROUNDINGS * torch.finfo(apart.dtype).eps * self.lengths
        return HiddenState((apart * (self.whole * known)[:, None]).view(self.raw.shape))

    def sequences(self, x: Tensor) -> Tensor:
        """Reshape (tokens, ...) to (sequences, T, ...)."""
        return x.view(-1, max(self.raw.shape[-2], 1), *x.shape[1:])

    @property
    def _width(self) -> int:
        if self.raw.ndim < 2:
            raise NormLabError(f"measures: expected a state of shape (..., tokens, width), got {tuple(self.raw.shape)}")
        return self.raw.shape[-1]


def sample(h: Tensor, most: int = TOKENS) -> Tensor:
    """(sequences, tokens, D), at most `most` tokens, evenly spaced over the positions of evenly spaced sequences."""
    if h.ndim < 2:
        return h
    h = h.reshape(-1, *h.shape[-2:])
    sequences, length = h.shape[:2]
    if sequences * length <= most:
        return h
    kept = min(length, max(most // sequences, _PER_SEQUENCE))
    rows = spaced(sequences, min(sequences, most // kept), h.device)
    return h[rows[:, None], spaced(length, kept, h.device)]


@functools.lru_cache(maxsize=64)
def spaced(total: int, count: int, device: torch.device) -> Tensor:
    """`count` evenly spaced indices below `total`."""
    return torch.arange(count, device=device) * total // count


def nonzero(x: Tensor) -> Tensor:
    """x with zeros replaced by 1, for use as a divisor."""
    return torch.where(x == 0, 1.0, x)
