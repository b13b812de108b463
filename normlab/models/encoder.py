"""`Encoder`: a bidirectional model (BERT-style) for masked-language modelling."""

from __future__ import annotations

import torch

from normlab.models.config import EncoderConfig
from normlab.models.tokens import TokenModel


class Encoder(TokenModel):
    """A bidirectional model trained on masked tokens: `encoder(tokens)` returns logits for every position.

    `loss(tokens, targets)` scores the positions whose target is not −100, which are the masked ones.
    """

    causal = False

    def __init__(self, config: EncoderConfig, *, device: torch.device | str | None = None):
        super().__init__(config, device=device)

    def features(self, inputs: torch.Tensor, *, documents: torch.Tensor | None = None) -> torch.Tensor:
        """The head's input (B, T, D). `documents` (B, T) numbers the documents packed into each row."""
        return self._states(inputs, documents)
