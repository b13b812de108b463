"""Masking for masked-language modelling (BERT, arXiv 1810.04805).

Of the chosen tokens, 80 % are replaced by the mask token, 10 % by a random token, and 10 % stay unchanged. The choice
depends on seed and position alone, so that a resumed run continues with the same bits, on any number of processes. End
tokens are never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.data.batch_loader import IGNORED
from normlab.data.windows import Window, mix_hash
from normlab.errors import NormLabError

_MASKED, _RANDOM = 0.8, 0.9
"""A chosen token is masked if its random number is below the first, replaced by a random token below the second."""


@dataclass(frozen=True)
class Masking:
    """Random masking of tokens. The mask token is the first number after the tokenizer's vocabulary."""

    vocabulary: int
    end: int
    seed: int
    share: float = 0.15
    """Fraction of the tokens that are chosen."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise NormLabError(f"mask must lie in (0, 1], a share of the tokens, got {self.share}; try 0.15")

    @property
    def mask(self) -> int:
        """The mask token."""
        return self.vocabulary

    def hide(self, rows: Window, numbers: np.ndarray) -> Window:
        """Mask windows: returns masked inputs, and targets that are `IGNORED` except at the chosen tokens.

        `numbers` are the indices of the windows. The tokens are taken from the windows' targets, because these contain
        every token of the corpus once.
        """
        tokens, real = rows.targets, rows.targets != IGNORED
        chances = self._chances(numbers, tokens.shape[1])
        chosen = real & (tokens != self.end) & (chances[0] < self.share)
        hidden = np.where(chances[1] < _MASKED, self.mask, (chances[2] * self.vocabulary).astype(np.int64))
        hidden = np.where(chances[1] < _RANDOM, hidden, tokens)
        inputs = np.where(chosen, hidden, np.where(real, tokens, 0))
        return Window(inputs, np.where(chosen, tokens, IGNORED), rows.documents)

    def _chances(self, numbers: np.ndarray, length: int) -> list[np.ndarray]:
        """Three random numbers in [0, 1) for every token."""
        key = mix_hash("masking", self.seed)
        windows = mix_hash(key, numbers.astype(np.uint64))[:, None]
        tokens = mix_hash(windows, np.arange(length, dtype=np.uint64)[None])
        return [(mix_hash(tokens, np.uint64(k)) >> np.uint64(11)) * 2.0**-53 for k in range(3)]
