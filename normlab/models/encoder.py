"""The encoder: every token looks at all others, before and after it."""

from __future__ import annotations

import torch

from normlab.models.config import EncoderConfig
from normlab.models.tokens import TokenModel


class Encoder(TokenModel):
    """A bidirectional model, trained on masked tokens: `encoder(tokens)` returns logits for every place.

    `loss(tokens, targets)` scores the places whose target is not −100: those that were masked.
    """

    causal = False

    def __init__(self, config: EncoderConfig, *, device: torch.device | str | None = None):
        super().__init__(config, device=device)

    def features(self, inputs: torch.Tensor, *, documents: torch.Tensor | None = None) -> torch.Tensor:
        """What the head reads: (B, T, D), after the exit. `documents` numbers the documents packed into each row."""
        return self._states(inputs, documents)
