"""Next-token prediction: a decoder on text, measured by validation loss and bits per byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from normlab.models.config import DecoderConfig
from normlab.train.config import TaskName
from normlab.train.metrics import LOSS
from normlab.train.tasks.text import TextTask, TextTrainConfig

if TYPE_CHECKING:
    import torch

    from normlab.data import Batch, Corpus
    from normlab.models.transformer import Transformer


_ECHO_TOKENS = 256
"""Tokens that `echo` averages over: all their logits are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class LanguageTrainConfig(TextTrainConfig):
    """Configuration of a language-modelling run: a decoder that predicts the next token."""

    model_class: ClassVar = DecoderConfig

    task: TaskName = "language"
    model: DecoderConfig = field(default_factory=DecoderConfig)


class Language(TextTask):
    """Predict every token from those before it."""

    config = LanguageTrainConfig
    metric = LOSS
    # Without gradients there is room, and small models wait for the host at every batch.
    evaluated_at_once = 4

    def measure(self, model: Transformer) -> Callable[..., torch.Tensor]:
        # No accuracy: it would compute the logits a second time.
        return model.cross_entropy

    def echo(self, model: Transformer, batch: Batch) -> float | None:
        from normlab.probes.start import read_probability

        features = model.features(batch.inputs[:1], **{name: value[:1] for name, value in batch.options.items()})
        return read_probability(model.logits(features[:, :_ECHO_TOKENS]), batch.inputs[:1, :_ECHO_TOKENS])

    def copying(self, model: Transformer, batch: Batch) -> dict[str, float | None]:
        from normlab.probes.copying import copy_losses

        found = copy_losses(model, batch.inputs)
        return {} if found is None else {"first_copy_loss": found.first, "second_copy_loss": found.second}

    def scores(self, means: Sequence[float], data: Corpus) -> dict[str, float]:
        (loss,) = means
        return {"loss": loss, "bits_per_byte": data.val.bits_per_byte(loss)}

    def describe(self, scores: Mapping[str, float]) -> str:
        main = f"{scores['loss']:.4f} nats a token, {scores['bits_per_byte']:.4f} bits a byte"
        return main + self.losses_of_sets(scores)
