"""Masked tokens (BERT, arXiv 1810.04805): some are hidden, and what stood there is to be found.

Of the tokens that are chosen, eight in ten become the mask, one in ten any token, one in ten stay as they are. Which,
follows from the seed and from the number of the window alone, so that a run that was stopped goes on to the same bits
and no number of machines changes anything. Ends of documents stand for no text and are never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.data.batch_loader import IGNORED
from normlab.data.windows import Window, mix_hash
from normlab.errors import NormLabError

_MASKED, _RANDOM = 0.8, 0.9
"""Below the first a chosen token is masked, below the second it is replaced by a random one."""


@dataclass(frozen=True)
class Masking:
    """How the tokens of a vocabulary are hidden; the mask is the first number that the tokenizer does not use."""

    vocabulary: int
    end: int
    seed: int
    share: float = 0.15
    """Of the tokens that are to be found."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise NormLabError(f"mask must lie in (0, 1], a share of the tokens, got {self.share}; try 0.15")

    @property
    def mask(self) -> int:
        return self.vocabulary

    def hide(self, rows: Window, numbers: np.ndarray) -> Window:
        """Windows with these numbers in the line: what is left of their tokens, and those that are to be found.

        The tokens are the windows' targets: every token of the corpus stands there once.
        """
        tokens, real = rows.targets, rows.targets != IGNORED
        chances = self._chances(numbers, tokens.shape[1])
        chosen = real & (tokens != self.end) & (chances[0] < self.share)
        hidden = np.where(chances[1] < _MASKED, self.mask, (chances[2] * self.vocabulary).astype(np.int64))
        hidden = np.where(chances[1] < _RANDOM, hidden, tokens)
        inputs = np.where(chosen, hidden, np.where(real, tokens, 0))
        return Window(inputs, np.where(chosen, tokens, IGNORED), rows.documents)

    def _chances(self, numbers: np.ndarray, length: int) -> list[np.ndarray]:
        """Three numbers in [0, 1) for every token."""
        key = mix_hash("masking", self.seed)
        windows = mix_hash(key, numbers.astype(np.uint64))[:, None]
        tokens = mix_hash(windows, np.arange(length, dtype=np.uint64)[None])
        return [(mix_hash(tokens, np.uint64(k)) >> np.uint64(11)) * 2.0**-53 for k in range(3)]
