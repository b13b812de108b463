"""Masked language modelling: an encoder on text, measured by loss and accuracy on the masked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from normlab.errors import NormLabError
from normlab.models.config import EncoderConfig
from normlab.train.config import TaskName
from normlab.train.metrics import MASKED_LOSS
from normlab.train.tasks.text import TextTask, TextTrainConfig

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Corpus, Masking


@dataclass(frozen=True, kw_only=True)
class MaskedTrainConfig(TextTrainConfig):
    """Configuration of a masked-language-modelling run: an encoder that predicts masked tokens."""

    model_class: ClassVar = EncoderConfig

    task: TaskName = "masked"
    model: EncoderConfig = field(default_factory=EncoderConfig)
    mask: float = 0.15
    """Fraction of the tokens that are masked and to be predicted."""

    def check(self) -> None:
        super().check()
        if not 0.0 < self.mask <= 1.0:
            raise NormLabError(f"mask must lie in (0, 1], a share of the tokens, got {self.mask}; try 0.15")


class MaskedTask(TextTask):
    """Predict masked tokens from all the others."""

    config = MaskedTrainConfig
    metric = MASKED_LOSS

    def open(self, config: TextTrainConfig, *, progress: bool) -> Corpus:
        from normlab.data import IGNORED

        data = super().open(config, progress=progress)
        # Before the run begins: a small validation set may have no masked token.
        for part in (data, *self.validation_sets(data).values()):
            if not any(bool((batch.targets != IGNORED).any()) for batch in self.evaluation(config, part, batch=1)):
                raise NormLabError(
                    f"none of the {part.val.n_tokens:,} validation tokens is masked, so nothing can be measured; "
                    "name more data, or raise val_fraction or mask"
                )
        return data

    def vocabulary(self, data: Corpus) -> int:
        # The mask is one more token, after those of the tokenizer.
        return data.tokenizer.vocab_size + 1

    def masking(self, config: MaskedTrainConfig, data: Corpus, seed: int) -> Masking:
        from normlab.data import Masking

        words = data.tokenizer
        return Masking(words.vocab_size, words.end, seed, config.mask)

    def target_counts(self, config: TextTrainConfig, data: Corpus) -> tuple[np.ndarray, np.ndarray]:
        trained, asked = super().target_counts(config, data)
        # Ends of documents are never masked.
        trained[data.tokenizer.end] = 0
        return trained, asked

    def describe(self, scores: Mapping[str, float]) -> str:
        main = f"{scores['loss']:.4f} nats a masked token, {100 * scores['accuracy']:.2f} % of them found"
        return main + self.losses_of_sets(scores)
