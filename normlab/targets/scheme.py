"""A scheme as a target: NormLab's decoder in one small set-up, the same for all schemes.

Matrices start as Xavier says and embeddings near unit RMS, over which the scheme's own rules (smaller outputs, unit
rows, a depth's constants) act as they always do. What a check says of a design depends on how it starts: from small,
tied embeddings the first block alone would set the size of the state, and most schemes would look alike.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.config import DecoderConfig, TransformerConfig
from normlab.models.memory_check import check_memory_for_parameters, estimate_params
from normlab.models.transformer import Transformer
from normlab.probes.start import LENGTH, Fresh
from normlab.roles import Role, drawing_order, xavier_std
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.pre import Pre
from normlab.targets.data import TokenData
from normlab.targets.target import Target, said
from normlab.targets.tasks import NextToken, TokenTask

DEPTH, WIDTH, HEAD = 48, 64, 16

_EMBEDDING = 1.12
"""RMS of the embedding, above the 1 of a norm's output, so that a missing first norm shows."""


class DesignTarget(Target):
    """Base class of targets that build NormLab models."""

    resizable = frozenset({"depth", "width"})
    blocks = "stack.layers.*"
    bases: tuple[int | None, int | None] = (None, None)
    """Width and depth at which the learning rate was tuned, if the design states them."""

    def __init__(self, design: TransformerConfig, **options: Any):
        super().__init__(**options)
        self._design, self.scheme = design, design.scheme_object
        self.depth, self.width = design.depth, design.dim

    def check_room(self, *, depth: int | None = None, width: int | None = None) -> None:
        design = self.sized(depth or self.depth, width)
        what = f"{self.name} at {design.depth:,} blocks of width {design.dim:,}"
        check_memory_for_parameters(estimate_params(design), self.device, what, "smaller --depths or --width")

    def sized(self, depth: int, width: int | None) -> TransformerConfig:
        """The design at another depth and, if given, another width."""
        return dataclasses.replace(self._at_width(width or self._design.dim), depth=depth)

    def _at_width(self, width: int) -> TransformerConfig:
        """The design at another width."""
        raise NotImplementedError

    def with_step(self, size: float) -> Target | None:
        scheme = self._design.scheme_object
        if "step" not in scheme.options():
            return None
        other = copy.copy(self)
        other.scheme = dataclasses.replace(scheme, step=size)
        other._design = dataclasses.replace(self._design, scheme=other.scheme)
        return other


class SchemeTarget(DesignTarget):
    """`peri(step=0.1)`."""

    kind = "scheme"

    def __init__(
        self,
        scheme: Scheme,
        data: TokenData,
        *,
        depth: int | None = None,
        width: int | None = None,
        length: int = 48,
        batch_size: int = 8,
        **options: Any,
    ):
        design = DecoderConfig(
            scheme=scheme, depth=depth or DEPTH, dim=width or WIDTH, heads=heads_for(width or WIDTH), tied=False,
            mlp=mlp_for(scheme), vocab_size=data.vocabulary, max_length=length,
        )  # fmt: skip
        super().__init__(design, **options)
        self.name = scheme.label
        self.task = NextToken(data, batch_size=batch_size, length=length)

    def with_step(self, size: float) -> Target | None:
        other = super().with_step(size)
        if other is not None:
            other.name = other.scheme.label  # type: ignore[union-attr]
        return other

    def _at_width(self, width: int) -> TransformerConfig:
        return dataclasses.replace(self._design, dim=width, heads=heads_for(width))

    def fresh(self, size: str, depth: int | None = None) -> list[Fresh]:
        """The design as checked, and at a preset size with an untied head; a tied head is reported as well."""
        preset = DecoderConfig.preset(size, scheme=self._design.scheme, tied=False)
        return [*super().fresh(size, depth), fresh_design(preset, size, with_tied=not preset.needs_own_head)]

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        model = self.sized(depth, width).build(device="meta").to_empty(device="cpu")
        initialise_(model, torch.Generator().manual_seed(seed))
        return model


def fresh_design(design: TransformerConfig, name: str, *, with_tied: bool = False) -> Fresh:
    """A NormLab model as `normlab train` would build it."""
    length = getattr(design, "max_length", LENGTH)
    return Fresh(name, lambda: design.build(device="cpu"), said, design.num_params(), with_tied, length=length)


def twin_of(target: Target) -> Target | None:
    """Pre-Norm decoder of the same size, for a target that predicts the next token."""
    task = target.task
    if not isinstance(task, TokenTask) or not task.causal:
        return None
    return SchemeTarget(
        Pre(), task.data, depth=target.depth, width=target.width, length=task.length, batch_size=task.batch_size,
        device=str(target.device), dtype=target.dtype,
    )  # fmt: skip


def initialise_(model: Transformer, generator: torch.Generator) -> None:
    """Initialise by the scheme's rules, with a separate base std for every matrix."""
    model.init_(generator=generator)
    for role in drawing_order(model.find_roles()):
        if role.is_matrix:
            model.stack.bound.init_([role], std=_base(role), generator=generator)


def mlp_for(scheme: Scheme) -> Literal["gelu", "swiglu"]:
    """The kind of MLP: plain, whose bound is tight; gated for a scheme that scales the gate."""
    return "swiglu" if any(need.name == "gate-scale" for need in scheme.needs) else "gelu"


def heads_for(width: int) -> int:
    """Number of heads of about 16 channels that divides the width into even parts, as rotary embeddings need."""
    for heads in range(max(1, width // HEAD), 0, -1):
        if width % (2 * heads) == 0:
            return heads
    raise NormLabError(f"width must be even, got {width}; try {width + 1}")


def _base(role: Role) -> float:
    if role.role == "embed":
        return _EMBEDDING
    # The size that torch gives a linear layer: logits start at an RMS of 0.6, near the loss of a guess.
    return math.sqrt(1.0 / (3.0 * role.fans[0])) if role.role == "head" else xavier_std(role, 1.0)
