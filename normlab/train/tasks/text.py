"""What tasks on text share: sources, tokenizers, windows, a budget in tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from normlab.errors import NormLabError
from normlab.models.config import TokenConfig, TransformerConfig
from normlab.train.tasks.base import Task

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Batch, Corpus, Masking
    from normlab.data.batch_loader import SampleSequence
    from normlab.train.config import TrainConfig
    from normlab.train.storage.folder import RunFolder

_COUNTED_AT_A_TIME = 64
"""Sequences of an evaluation whose targets are counted at a time."""

VOCABULARY_MULTIPLE = 64
"""A vocabulary is rounded up to this: matrix products run faster, and the spare entries are never a target."""


_EVAL_SHARE, _LEAST_EVAL, _MOST_EVAL = 0.1, 10_000, 200_000
"""Tokens of an evaluation by default, as a share of the training tokens, and their limits: ten evaluations then cost a
third of the training, and a loss keeps a standard error of a few hundredths."""


def default_eval_tokens(tokens: int) -> int:
    """Tokens of an evaluation of a run of so many tokens, where the user names no number."""
    return min(_MOST_EVAL, max(_LEAST_EVAL, round(_EVAL_SHARE * tokens)))


class TextTask(Task):
    """Windows of a text, some or all of whose tokens are to be found."""

    fields = ("tokenizer", "boundaries", "tokens", "length", "eval_tokens")
    data = ("python",)
    val_fraction = 0.02

    def check(self, config: TrainConfig) -> None:
        for name in ("tokens", "length", "eval_tokens"):
            if getattr(config, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(config, name)}")

    def settled(self, config: TrainConfig) -> dict[str, Any]:
        named = config.eval_tokens
        return super().settled(config) | {"eval_tokens": default_eval_tokens(config.tokens) if named is None else named}

    def fitted(self, config: TrainConfig) -> TransformerConfig:
        model = cast(TokenConfig, config.model)
        return model if model.max_length >= config.length else dataclasses.replace(model, max_length=config.length)

    def sequence(self, config: TrainConfig) -> int:
        return config.length

    def steps(self, config: TrainConfig) -> int:
        """As many whole batches as it takes to see all tokens."""
        return math.ceil(config.tokens / (config.batch * config.length))

    def of_preset(self, size: Mapping[str, Any]) -> dict[str, Any]:
        return {"length": size["max_length"]}

    def open(self, config: TrainConfig, *, progress: bool) -> Corpus:
        from normlab.data import prepare

        options = {"tokenizer": config.tokenizer, "val_data": config.val_data, "val_fraction": config.val_fraction}
        return prepare(config.data, **options, progress=progress)

    def with_answers(self, config: TrainConfig, data: Corpus) -> TransformerConfig:
        padded = VOCABULARY_MULTIPLE * math.ceil(self.vocabulary(data) / VOCABULARY_MULTIPLE)
        return dataclasses.replace(config.model, vocab_size=padded)

    def vocabulary(self, data: Corpus) -> int:
        """Tokens that the model must know."""
        return data.tokenizer.vocab_size

    def masking(self, config: TrainConfig, data: Corpus, seed: int) -> Masking | None:
        """How tokens are hidden, if they are."""
        return None

    def line(self, config: TrainConfig, data: Corpus) -> SampleSequence:
        from normlab.data import TextSamples

        options = {"length": config.length, "seed": config.seed, "boundaries": config.boundaries}
        return TextSamples(data.train, **options, masking=self.masking(config, data, config.seed))

    def evaluation(self, config: TrainConfig, data: Corpus, *, batch: int, **places: Any) -> Iterator[Batch]:
        from normlab.data import evaluation_batches

        # Hidden in the same way whatever the seed of the run: all runs answer the same questions.
        masking = self.masking(config, data, seed=0)
        options = {"length": config.length, "max_tokens": config.eval_tokens, "boundaries": config.boundaries}
        return evaluation_batches(data.val, batch=batch, **options, masking=masking, **places)

    def target_counts(self, config: TrainConfig, data: Corpus) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        from normlab.data import IGNORED
        from normlab.data.frequencies import token_counts

        size = data.tokenizer.vocab_size
        asked = np.zeros(size, np.int64)
        # The very targets that the model is evaluated on, and no others.
        for batch in self.evaluation(config, data, batch=_COUNTED_AT_A_TIME):
            targets = batch.targets[batch.targets != IGNORED].numpy()
            asked += np.bincount(targets, minlength=size)
        return token_counts(data.train, size), asked

    def evaluation_samples(self, config: TrainConfig, data: Corpus) -> int:
        return math.ceil(min(data.val.n_tokens, config.eval_tokens or data.val.n_tokens) / config.length)

    def keep(self, data: Corpus, folder: RunFolder) -> None:
        data.tokenizer.save(folder.tokenizer)
