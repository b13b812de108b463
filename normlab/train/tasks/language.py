"""The next token of a text: a decoder, judged by its loss, which is also told in bits a byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from normlab.models.config import DecoderConfig
from normlab.train.metrics import LOSS
from normlab.train.tasks.text import TextTask

if TYPE_CHECKING:
    import torch

    from normlab.data import Batch, Corpus
    from normlab.models.transformer import Transformer


_ECHO_TOKENS = 256
"""Tokens that the echo is averaged over: their logits are all there at once."""


class Language(TextTask):
    """Every token from those before it."""

    name = "language"
    about = "the next token of a text"
    model = DecoderConfig
    metric = LOSS

    def measure(self, model: Transformer) -> Callable[..., torch.Tensor]:
        # Which token is the likeliest is not asked: the head would work twice.
        return model.cross_entropy

    def echo(self, model: Transformer, batch: Batch) -> float | None:
        from normlab.probes.start import read_probability

        features = model.features(batch.inputs[:1], **{name: value[:1] for name, value in batch.options.items()})
        return read_probability(model.logits(features[:, :_ECHO_TOKENS]), batch.inputs[:1, :_ECHO_TOKENS])

    def scores(self, means: Sequence[float], data: Corpus) -> dict[str, float]:
        (loss,) = means
        return {"loss": loss, "bits_per_byte": data.val.bits_per_byte(loss)}

    def describe(self, scores: Mapping[str, float]) -> str:
        return f"{scores['loss']:.4f} nats a token, {scores['bits_per_byte']:.4f} bits a byte"
