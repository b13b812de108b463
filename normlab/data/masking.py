"""BERT's masking (arXiv 1810.04805): inputs in which some tokens are masked, and the masked tokens as targets.

Of the tokens that are chosen, eight in ten become the mask, one in ten a random token, one in ten stay as they are.
`mask_tokens` is that rule. `Masking` applies it to the windows of a text: its random numbers depend on the seed and the
number of the window alone, so that a resumed run and any number of processes see the same bits. Ends of documents are
never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.data.batch_loader import IGNORED
from normlab.data.windows import Window, mix_hash
from normlab.errors import NormLabError

SHARE = 0.15
"""Of the tokens that are chosen."""

_MASKED, _RANDOM = 0.8, 0.9
"""A chosen token is masked if its random number is below the first, replaced by a random token below the second."""


def mask_tokens(
    tokens: np.ndarray, chosen: np.ndarray, draws: np.ndarray, others: np.ndarray, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a masked batch; all arrays have the shape of `tokens`.

    `chosen` says which tokens are to be predicted: targets are `IGNORED` elsewhere. `draws` are uniform numbers in
    [0, 1) that decide what becomes of a chosen token; `others` are the random tokens that may replace it.
    """
    replaced = np.where(draws < _MASKED, mask, np.where(draws < _RANDOM, others, tokens))
    return np.where(chosen, replaced, tokens), np.where(chosen, tokens, IGNORED)


@dataclass(frozen=True)
class Masking:
    """Random masking of tokens. The mask token is the first number after the tokenizer's vocabulary."""

    vocabulary: int
    end: int
    seed: int
    share: float = SHARE
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
        others = (chances[2] * self.vocabulary).astype(np.int64)
        inputs, targets = mask_tokens(np.where(real, tokens, 0), chosen, chances[1], others, self.mask)
        return Window(inputs, targets, rows.documents)

    def _chances(self, numbers: np.ndarray, length: int) -> list[np.ndarray]:
        """Three random numbers in [0, 1) for every token."""
        key = mix_hash("masking", self.seed)
        windows = mix_hash(key, numbers.astype(np.uint64))[:, None]
        tokens = mix_hash(windows, np.arange(length, dtype=np.uint64)[None])
        return [(mix_hash(tokens, np.uint64(k)) >> np.uint64(11)) * 2.0**-53 for k in range(3)]
