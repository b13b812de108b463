"""Workloads of NormLab's own models: next tokens, masked tokens or images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.tokens import TokenModel
from normlab.models.transformer import Transformer
from normlab.models.vision import VisionTransformer
from normlab.targets.data import TokenData
from normlab.targets.tasks import NextToken, TokenTask, Workload, fixed, hide, noisy_copies

_CLASSES = 16
"""Largest number of classes."""


class MaskedTokens(TokenTask):
    """Masked tokens for an encoder; the mask is `spare`, a token that does not occur in the data."""

    causal = False

    def __init__(self, data: TokenData, *, spare: int, **sizes: int):
        super().__init__(data, **sizes)
        self._spare = spare

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for tokens in self.sequences(seed, self.length):
            yield hide(tokens, torch.arange(self.data.vocabulary), self._spare, generator)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model.loss(*batch)  # type: ignore[operator]

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return model(batch[0])


class Pictures(Workload):
    """Image classification for a vision Transformer: noisy copies of a few random images, one for each class."""

    def __init__(self, model: VisionTransformer, *, batch_size: int):
        shape = model.example(1, model.config.sequence)[0].shape[1:]
        self.batch_size = batch_size
        self._pictures = fixed(min(model.config.classes, _CLASSES), shape.numel()).view(-1, *shape)

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return noisy_copies(self._pictures, self.batch_size, seed)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model.loss(*batch)  # type: ignore[operator]

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return model(batch[0])


def spare_tokens(model: Transformer) -> int:
    """Number of tokens reserved by the model: one mask token for a masked model."""
    return int(isinstance(model, TokenModel) and not model.causal)


def own_task(
    model: Transformer, data: TokenData, *, length: int, batch_size: int, spare: int | None = None
) -> Workload:
    """The workload of a NormLab model; `spare` is the mask token, by default the last of the vocabulary."""
    if isinstance(model, VisionTransformer):
        return Pictures(model, batch_size=batch_size)
    assert isinstance(model, TokenModel)
    sizes = {"length": min(length, model.config.max_length), "batch_size": batch_size}
    if model.causal:
        return NextToken(data, **sizes)
    hidden_by = model.config.vocab_size - 1 if spare is None else spare
    if hidden_by < data.vocabulary:
        raise NormLabError(
            f"the data has {data.vocabulary} tokens, the model {model.config.vocab_size}: none is left to hide others "
            "behind; try bigram data"
        )
    return MaskedTokens(data, spare=hidden_by, **sizes)
