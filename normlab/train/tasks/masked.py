"""Masked tokens of a text: an encoder, judged by its loss on what was hidden, and by how often it finds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from normlab.errors import NormLabError
from normlab.models.config import EncoderConfig
from normlab.train.metrics import MASKED_LOSS
from normlab.train.tasks.text import TextTask

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Corpus, Masking
    from normlab.train.config import TrainConfig


class MaskedTask(TextTask):
    """Tokens that were hidden, from all that stand around them."""

    name = "masked"
    about = "masked tokens of a text"
    model = EncoderConfig
    fields = (*TextTask.fields, "mask")
    metric = MASKED_LOSS

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if not 0.0 < config.mask <= 1.0:
            raise NormLabError(f"mask must lie in (0, 1], a share of the tokens, got {config.mask}; try 0.15")

    def open(self, config: TrainConfig, *, progress: bool) -> Corpus:
        from normlab.data import IGNORED

        data = super().open(config, progress=progress)
        # Before a run begins: a few tokens may have none among them that is hidden.
        if not any(bool((batch.targets != IGNORED).any()) for batch in self.evaluation(config, data, batch=1)):
            raise NormLabError(
                f"none of the {data.val.n_tokens:,} validation tokens is masked, so nothing can be measured; "
                "name more data, or raise val_fraction or mask"
            )
        return data

    def vocabulary(self, data: Corpus) -> int:
        # The mask is a token of its own, after those of the tokenizer.
        return data.tokenizer.vocab_size + 1

    def masking(self, config: TrainConfig, data: Corpus, seed: int) -> Masking:
        from normlab.data import Masking

        words = data.tokenizer
        return Masking(words.vocab_size, words.end, seed, config.mask)

    def target_counts(self, config: TrainConfig, data: Corpus) -> tuple[np.ndarray, np.ndarray]:
        trained, asked = super().target_counts(config, data)
        # Ends of documents are never masked.
        trained[data.tokenizer.end] = 0
        return trained, asked

    def describe(self, scores: Mapping[str, float]) -> str:
        return f"{scores['loss']:.4f} nats a masked token, {100 * scores['accuracy']:.2f} % of them found"
