"""Training tasks on text: tokenizer, fixed-length sequences, a budget in tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from normlab.choices import Boundaries
from normlab.errors import NormLabError, advice_for
from normlab.models.config import TokenConfig
from normlab.train.config import TrainConfig
from normlab.train.tasks.base import Task
from normlab.utils.counts import Count

if TYPE_CHECKING:
    import numpy as np

    from normlab.data import Batch, Corpus, Masking
    from normlab.data.batch_loader import SampleSequence
    from normlab.train.storage.folder import RunFolder

_COUNTED_AT_A_TIME = 64
"""Batch size while the targets of an evaluation are counted."""

VOCABULARY_MULTIPLE = 64
"""The vocabulary size is rounded up to a multiple of this: matrix products are faster. The padding is no target."""


_EVAL_SHARE, _LEAST_EVAL, _MOST_EVAL = 0.1, 10_000, 200_000
"""Default size of an evaluation, as a fraction of the training tokens, and its limits: ten evaluations then cost a
third of the training, and a loss keeps a standard error of a few hundredths."""


def default_eval_tokens(tokens: int) -> int:
    """Default number of tokens of an evaluation of a run on `tokens` tokens."""
    return min(_MOST_EVAL, max(_LEAST_EVAL, round(_EVAL_SHARE * tokens)))


@dataclass(frozen=True, kw_only=True)
class TextTrainConfig(TrainConfig):
    """What the tasks on text share."""

    budget: ClassVar = "tokens"

    model: TokenConfig
    data: tuple[str, ...] = ("python",)
    """Text: files, folders, globs, hf:NAME; python: the standard library of the running Python."""
    val_fraction: float = 0.02
    """Fraction of the documents held out for validation where val_data is empty."""
    val_sets: tuple[str, ...] = ()
    """Further validation sets, evaluated at the end of the run: NAME=FILES, e.g. books=books-val.jsonl.xz."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, bpe:N (trained on the data), a file of the tokenizers package, or a Hugging Face id."""
    boundaries: Boundaries = "packed"
    """Attention across the documents packed into a sequence, or only within each (respected)."""
    tokens: Count = 2_000_000
    """Training tokens, e.g. 33M or 1.5B."""
    length: int = 256
    """Sequence length in tokens."""
    eval_tokens: Count | None = None
    """Tokens of an evaluation, at most; none: a tenth of tokens, from 10,000 to 200,000."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.max_length < self.length:
            self._set("model", dataclasses.replace(self.model, max_length=self.length))

    def fill_defaults(self) -> None:
        super().fill_defaults()
        if self.eval_tokens is None:
            self._set("eval_tokens", default_eval_tokens(self.tokens))

    def check(self) -> None:
        for name in ("tokens", "length", "eval_tokens"):
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}; {advice_for(self, name)}")
        if len(self.sources_of_sets) < len(self.val_sets):
            raise NormLabError(
                f"val_sets names a set twice: {' '.join(self.val_sets)}; a folder or glob holds several files"
            )

    @property
    def sources_of_sets(self) -> dict[str, str]:
        """The sources of the further validation sets, by name."""
        return dict(map(_name_and_source, self.val_sets))

    @property
    def steps(self) -> int:
        """Optimiser steps: whole batches that cover all tokens."""
        return math.ceil(self.tokens / (self.batch * self.length))

    @property
    def sequence(self) -> int:
        return self.length

    @classmethod
    def preset_fields(cls, size: str) -> dict[str, Any]:
        return {"length": cls.model_class.presets[size]["max_length"]}


class TextTask(Task):
    """Sequences of a text, some or all of whose tokens are to be predicted."""

    def open(self, config: TextTrainConfig, *, progress: bool) -> Corpus:
        from normlab.data import prepare

        options = {"tokenizer": config.tokenizer, "val_data": config.val_data, "val_fraction": config.val_fraction}
        return prepare(config.data, **options, val_sets=config.sources_of_sets, progress=progress)

    def check_sources(self, config: TextTrainConfig) -> None:
        from normlab.data.sources import find_source
        from normlab.data.tokenizer import is_tokenizer_file, load_tokenizer

        for spec in (*config.data, *config.val_data, *config.sources_of_sets.values()):
            find_source(spec)
        if is_tokenizer_file(config.tokenizer):
            load_tokenizer(Path(config.tokenizer).expanduser())

    def with_answers(self, config: TextTrainConfig, data: Corpus) -> TokenConfig:
        padded = VOCABULARY_MULTIPLE * math.ceil(self.vocabulary(data) / VOCABULARY_MULTIPLE)
        return dataclasses.replace(config.model, vocab_size=padded)

    def vocabulary(self, data: Corpus) -> int:
        """Vocabulary size that the model needs."""
        return data.tokenizer.vocab_size

    def masking(self, config: Any, data: Corpus, seed: int) -> Masking | None:
        """How input tokens are masked; None: not at all."""
        return None

    def line(self, config: TextTrainConfig, data: Corpus) -> SampleSequence:
        from normlab.data import TextSamples

        options = {"length": config.length, "seed": config.seed, "boundaries": config.boundaries}
        return TextSamples(data.train, **options, masking=self.masking(config, data, config.seed))

    def evaluation(self, config: TextTrainConfig, data: Corpus, *, batch: int, **places: Any) -> Iterator[Batch]:
        return self._evaluation(config, data, config.length, config.eval_tokens, batch=batch, **places)

    def few_samples(self, config: TextTrainConfig, data: Corpus, most: int, **places: Any) -> Batch:
        length = min(config.length, data.val.n_tokens)
        count = min(most, data.val.n_tokens // length)
        return next(self._evaluation(config, data, length, count * length, batch=count, **places))

    def _evaluation(
        self, config: TextTrainConfig, data: Corpus, length: int, tokens: int | None, **places: Any
    ) -> Iterator[Batch]:
        from normlab.data import evaluation_batches

        # The same mask whatever the seed of the run: all runs are evaluated on the same targets.
        masking = self.masking(config, data, seed=0)
        options = {"length": length, "max_tokens": tokens, "boundaries": config.boundaries}
        return evaluation_batches(data.val, **options, masking=masking, **places)

    def target_counts(self, config: TextTrainConfig, data: Corpus) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        from normlab.data import IGNORED
        from normlab.data.frequencies import token_counts

        size = data.tokenizer.vocab_size
        asked = np.zeros(size, np.int64)
        # Exactly the targets that the model is evaluated on.
        for batch in self.evaluation(config, data, batch=_COUNTED_AT_A_TIME):
            targets = batch.targets[batch.targets != IGNORED].numpy()
            asked += np.bincount(targets, minlength=size)
        return token_counts(data.train, size), asked

    def evaluation_samples(self, config: TextTrainConfig, data: Corpus) -> int:
        return math.ceil(min(data.val.n_tokens, config.eval_tokens or data.val.n_tokens) / config.length)

    def validation_sets(self, data: Corpus) -> dict[str, Corpus]:
        return {name: dataclasses.replace(data, val=tokens) for name, tokens in data.val_sets.items()}

    def keep(self, data: Corpus, folder: RunFolder) -> None:
        data.tokenizer.save(folder.tokenizer)

    def losses_of_sets(self, scores: Mapping[str, float]) -> str:
        """The losses on further validation sets, for `describe`."""
        of_sets = {name.removeprefix("loss_"): value for name, value in scores.items() if name.startswith("loss_")}
        return "".join(f"; {name} {value:.4f}" for name, value in of_sets.items())


def _name_and_source(text: str) -> tuple[str, str]:
    name, _, source = text.partition("=")
    if not (name.isidentifier() and source):
        raise NormLabError(
            f"val_sets expects NAME=FILES with a name of letters, digits and underscores, e.g. "
            f"books=books-val.jsonl.xz, got {text!r}"
        )
    return name, source
