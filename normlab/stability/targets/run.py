"""A run that `normlab train` made: its design at any size, or the weights that it ended with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from normlab.errors import NormLabError
from normlab.models.config import DecoderConfig
from normlab.models.decoder import Decoder
from normlab.stability.data import MADE_UP, TokenData, token_data
from normlab.stability.targets.base import Target
from normlab.stability.targets.scheme import DecoderTarget
from normlab.stability.targets.tasks import NextToken
from normlab.train.run import Run, load_run
from normlab.train.transfer import Transfer


class RunTarget(DecoderTarget):
    """The decoder of a run, initialised as the run was; with `weights`, the trained one itself."""

    kind = "run"

    def __init__(
        self,
        folder: Path,
        *,
        data: str = "bigram",
        vocabulary: int = 64,
        length: int = 48,
        batch_size: int = 8,
        depth: int | None = None,
        width: int | None = None,
        weights: bool = False,
        **options: Any,
    ):
        run = load_run(folder)
        super().__init__(run.config.model, **options)
        self.folder, self.name, self.weights = folder, folder.resolve().name, weights
        self._base_dim = run.config.base_dim
        if weights:
            self.resizable = frozenset()
            run.model  # noqa: B018  # a run that has no weights yet says so here
        self.depth, self.width = self._allowed("depth", depth, self.depth), self._allowed("width", width, self.width)
        tokens = _tokens(run, data, vocabulary)
        self.task = NextToken(tokens, length=min(length, self._design.max_length), batch_size=batch_size)
        if data in MADE_UP:
            self._fit_to(tokens, data)

    def _fit_to(self, tokens: TokenData, data: str) -> None:
        if self.weights:
            self.notes = (f"trained weights on {data} tokens, which the run never saw; name a text with --data FILE",)
        elif tokens.vocabulary < self._design.vocab_size:
            # As for published models: tokens that never occur would make all states alike.
            self.notes = (f"vocab_size {self._design.vocab_size} -> {tokens.vocabulary}, as many as the data has",)
            self._design = dataclasses.replace(self._design, vocab_size=tokens.vocabulary)

    def with_step(self, size: float) -> Target | None:
        return None if self.weights else super().with_step(size)

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        if self.weights:
            return load_run(self.folder).model
        design = dataclasses.replace(resized(self._design, width or self._design.dim), depth=depth)
        model = Decoder(design, device="cpu")
        return model if self._base_dim is None else Transfer(self._base_dim, design.dim).init_(model)


def resized(config: DecoderConfig, width: int) -> DecoderConfig:
    """The same decoder at another width: as many more heads, of the same size, and an MLP as much wider."""
    if width == config.dim:
        return config

    def scaled(size: int) -> int:
        return max(1, round(size * width / config.dim))

    kv_heads = config.kv_heads or config.heads
    return dataclasses.replace(
        config,
        dim=width,
        heads=scaled(kv_heads) * (config.heads // kv_heads),
        kv_heads=scaled(kv_heads),
        head_dim=config.width_of_head,
        hidden=scaled(config.width_of_mlp),
        shared_hidden=scaled(config.shared_hidden) if config.shared_hidden else 0,
    )


def _tokens(run: Run, data: str, vocabulary: int) -> TokenData:
    """Made-up tokens within the run's vocabulary, or a text in the run's own tokens."""
    size = run.config.model.vocab_size
    tokenizer = str(run.folder.tokenizer) if run.folder.tokenizer.is_file() else "bytes"
    tokens = token_data(data, vocabulary=min(vocabulary, size), tokenizer=tokenizer)
    if tokens.vocabulary > size:
        raise NormLabError(
            f"{run.folder.path}: the data has {tokens.vocabulary} tokens, the run {size}; try --data bigram"
        )
    return tokens
