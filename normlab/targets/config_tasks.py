"""Workloads of Hugging Face models: causal, masked, sequence-to-sequence, headless and image tasks.

Every batch is a dict of what `forward` takes, labels included, so that the loss is the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.targets import hub
from normlab.targets.config_sizes import parts, special_tokens
from normlab.targets.data import TokenData
from normlab.targets.tasks import TokenTask, Workload, answer, cross_entropy, fixed, hide, noisy_copies, read_out

Batch = dict[str, torch.Tensor]


class OwnLoss(Workload):
    """A workload whose model returns its own loss."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with hub.quiet():
            return model(**batch).loss

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        with hub.quiet():
            return getattr(model(**batch), "logits", None)


class ModelTokens(TokenTask, OwnLoss):
    """Token data without the model's special tokens."""

    def __init__(self, config: Any, data: TokenData, **options: Any):
        super().__init__(data, **options)
        text = config.get_text_config()
        special = special_tokens(config)
        free = [token for token in range(text.vocab_size) if token not in special]
        if len(free) < data.vocabulary:
            raise NormLabError(
                f"the data has {data.vocabulary} tokens and the model room for {len(free)}; try data='bigram'"
            )
        self._ids, self._spare = torch.tensor(free[: data.vocabulary]), text.vocab_size - 1
        longest = getattr(text, "max_position_embeddings", None)
        self.length = min(self.length, longest) if isinstance(longest, int) and longest > 0 else self.length

    def sequences(self, seed: int, length: int) -> Iterator[torch.Tensor]:
        return (self._ids[tokens] for tokens in super().sequences(seed, length))


class Causal(ModelTokens):
    """Predict the next token; the library shifts the labels."""

    def batches(self, seed: int) -> Iterator[Batch]:
        for tokens in self.sequences(seed, self.length):
            yield {"input_ids": tokens, "labels": tokens}


class MaskedWorkload(ModelTokens):
    """Predict masked tokens (BERT); the mask is a token that never occurs in the data."""

    causal = False

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for tokens in self.sequences(seed, self.length):
            seen, labels = hide(tokens, self._ids, self._spare, generator)
            yield {"input_ids": seen, "labels": labels}


class SequenceToSequence(ModelTokens):
    """Encode the first half of a text and predict the second."""

    causal = False

    def batches(self, seed: int) -> Iterator[Batch]:
        for tokens in self.sequences(seed, 2 * self.length):
            source, target = (half.contiguous() for half in tokens.chunk(2, dim=1))
            # The library would shift the labels itself, but only where the configuration names a first token.
            before = torch.cat([torch.full_like(target[:, :1], self._spare), target[:, :-1]], dim=1)
            yield {"input_ids": source, "decoder_input_ids": before, "labels": target}


class Headless(ModelTokens):
    """Next-token prediction without a head of its own: a fixed random head reads the model's states."""

    has_head = False

    def batches(self, seed: int) -> Iterator[Batch]:
        for tokens in self.data.sequences(self.batch_size, self.length + 1, seed):
            yield {"input_ids": self._ids[tokens[:, :-1]], "targets": tokens[:, 1:]}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        states = answer(model(**inputs))
        return cross_entropy(read_out(states, self.data.vocabulary), batch["targets"])

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return None


class ImageWorkload(OwnLoss):
    """Image classification: noisy copies of a few random images, one image for each class."""

    def __init__(self, config: Any, data: TokenData, *, batch_size: int, length: int):
        shapes = [image_shape(part) for _, part in parts(config)]
        shape = next((shape for shape in shapes if shape is not None), None)
        if shape is None:
            raise NormLabError(
                "its configuration has neither a vocabulary nor the size of an image; pass a live module with a batch"
            )
        self.batch_size, self.classes = batch_size, max(2, min(config.num_labels or 2, data.vocabulary))
        self._pictures = fixed(self.classes, math.prod(shape)).view(-1, *shape)

    def batches(self, seed: int) -> Iterator[Batch]:
        for pixels, labels in noisy_copies(self._pictures, self.batch_size, seed):
            yield {"pixel_values": pixels, "labels": labels}


class HeadlessImages(ImageWorkload):
    """Image classification without a head of its own: a fixed random head reads the mean of the model's states."""

    has_head = False

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        states = answer(model(pixel_values=batch["pixel_values"]))
        return cross_entropy(read_out(states.mean(1), self.classes), batch["labels"])

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return None


def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a model for token ids; an encoder-decoder gets them on both sides."""
    both = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    with hub.quiet():
        return model(input_ids=ids, **both).logits


def image_shape(part: Any) -> tuple[int, int, int] | None:
    size, channels = getattr(part, "image_size", None), getattr(part, "num_channels", 3)
    if isinstance(size, int):
        return channels, size, size
    return (channels, *size) if isinstance(size, list | tuple) and len(size) == 2 else None


def headless(config: Any, data: TokenData, **options: Any) -> Workload:
    """The task of a model without a head: images where the configuration has them and no vocabulary, else tokens."""
    text = config.get_text_config()
    return (Headless if isinstance(getattr(text, "vocab_size", None), int) else HeadlessImages)(config, data, **options)
