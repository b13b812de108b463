"""A training run as a target: its design at any size, or its trained weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from normlab.errors import NormLabError
from normlab.models.config import TokenConfig, TransformerConfig
from normlab.probes.start import Fresh
from normlab.targets.data import MADE_UP, TokenData, token_data
from normlab.targets.own_tasks import own_task, spare_tokens
from normlab.targets.scheme import DesignTarget, fresh_design
from normlab.targets.target import Target
from normlab.train.run import Run, load_run
from normlab.train.transfer import Transfer


class RunTarget(DesignTarget):
    """The model of a run, initialised as in that run; with `weights` the trained model."""

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
        self.bases, self._trained = (run.config.base_dim, run.config.base_depth), run.config.model
        if weights:
            self.resizable = frozenset()
            run.model  # noqa: B018  # a run that has no weights yet says so here
        self.depth, self.width = self._allowed("depth", depth, self.depth), self._allowed("width", width, self.width)
        tokens, spare = token_data("bigram", vocabulary=vocabulary), None
        if isinstance(self._design, TokenConfig):
            tokens = _tokens(run, data, vocabulary)
            # Trained weights know their own mask; others take any token that the data does not have.
            spare = run.tokenizer.vocab_size if weights else None
            self._design = self._fit_to(self._design, tokens, data)
        sizes = {"length": length, "batch_size": batch_size}
        self.task = own_task(self._design.build(device="meta"), tokens, **sizes, spare=spare)

    def _fit_to(self, design: TokenConfig, tokens: TokenData, data: str) -> TokenConfig:
        size = tokens.vocabulary + spare_tokens(design.build(device="meta"))
        if data not in MADE_UP or size >= design.vocab_size:
            return design
        if self.weights:
            self.notes = (f"trained weights on {data} tokens, which the run never saw; name a text with --data FILE",)
            return design
        # As for published models: tokens that never occur would make all states alike.
        self.notes = (f"vocab_size {design.vocab_size} -> {size}, as many as the data has",)
        return dataclasses.replace(design, vocab_size=size)

    def fresh(self, size: str, depth: int | None = None) -> list[Fresh]:
        """The run's model before its first step."""
        design = self._trained
        if self.weights or not isinstance(design, TokenConfig):
            return []
        made = fresh_design(design, f"{design.depth} blocks, width {design.dim}")
        return [dataclasses.replace(made, build=lambda: self._initial(design))]

    def with_step(self, size: float) -> Target | None:
        return None if self.weights else super().with_step(size)

    def _at_width(self, width: int) -> TransformerConfig:
        return resized(self._design, width)

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        if self.weights:
            return load_run(self.folder).model
        return self._initial(self.sized(depth, width))

    def _initial(self, design: TransformerConfig) -> nn.Module:
        transfer = Transfer.to(design, *self.bases)
        if transfer is None:
            return design.build(device="cpu")
        return transfer.init_(transfer.design(design).build(device="cpu"))


def resized(config: TransformerConfig, width: int) -> TransformerConfig:
    """The model configuration at another width: heads and MLP width scale with it, the head size stays."""
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
    """Synthetic tokens within the run's vocabulary, or a text in the run's own tokenizer."""
    model = run.config.model
    size = model.answers - spare_tokens(model.build(device="meta"))
    tokenizer = str(run.folder.tokenizer) if run.folder.tokenizer.is_file() else "bytes"
    tokens = token_data(data, vocabulary=min(vocabulary, size), tokenizer=tokenizer)
    if tokens.vocabulary > size:
        raise NormLabError(
            f"{run.folder.path}: the data has {tokens.vocabulary} tokens, the run {size}; try --data bigram"
        )
    return tokens
