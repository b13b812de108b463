"""Width and depth transfer: rules under which a rate tuned with a small model holds for a larger one.

Width: muP (arXiv 2203.03466). With m = dim / base width, and relative to what the scheme does at the base width:

    role                        initial std    rate (AdamW)    rate (Muon)
    q k v o gate up down        1/√m           1/m             1/√m
    embed, patch, position,     1              1               –
    spread of coefficients
    head of its own, router,    1/m            1/m             –
    mixing of streams
    gains, scales, biases       1              1               –
    tied head                   logits × 1/m
    AdamW's ε inside blocks     1/m

The scheme's own rules stay: they are asked at both widths, and only what they lack is added (Xavier already shrinks
like 1/√m). Where a scheme pins the size of a matrix after every step, the matrix keeps that size and its rate follows:
a weight that is c times the size in the table learns at c times the rate. A learned scale whose raw value the scheme
ties to the width (`LearnedScale.scaling`) learns in proportion to it. Muon's updates have full rank, so that they grow
like √m where AdamW's grow like m. Weight decay is divided by the rate's factor: what decays in a step is then the same
at every width.

Depth: CompleteP (arXiv 2505.01618, α = 1). With m = depth / base depth, where the scheme's rule is derived
(`Scheme.depth_transfer`):

    branch outputs              × 1/m, by `Scheme.at_depth`
    initial std, rates, decay   as at the base depth: outputs are not divided by the √(2L) of the deeper model
    AdamW's ε inside blocks     1/m, as the gradients there

Other schemes keep their own constants for the depth, and ε; that a rate holds at another depth is then a hypothesis.

Head width, batch and length stay as they were tuned: width grows by heads, not by their size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.config import TransformerConfig
from normlab.models.transformer import Transformer
from normlab.roles import Role
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.scales import ConstantScale, LearnedScale

Rule = Literal["adamw", "muon"]
"""The update rule of a parameter."""

HIDDEN = ("q", "k", "v", "o", "gate", "up", "down")
"""Roles of matrices both of whose dimensions grow with the width."""

_READOUT = ("head", "router", "mix")

_BLOCKS = "stack.layers."
"""Prefix of the names of parameters inside blocks."""


@dataclass(frozen=True)
class Transfer:
    """From a model of width `base_dim`, at which the rate was tuned, to one of width `dim`; for the depth likewise."""

    base_dim: int
    dim: int
    base_depth: int | None = None
    depth: int | None = None
    """Depths in blocks; both are None where the depth is not transferred."""

    def __post_init__(self) -> None:
        if self.base_dim < 1 or self.dim < 1:
            raise NormLabError(f"transfer: widths must be at least 1, got base {self.base_dim} and {self.dim}")
        if (self.base_depth is None) != (self.depth is None):
            raise NormLabError(f"transfer: expected two depths or none, got base {self.base_depth} and {self.depth}")
        if any(depth is not None and depth < 1 for depth in (self.base_depth, self.depth)):
            raise NormLabError(f"transfer: depths must be at least 1, got base {self.base_depth} and {self.depth}")

    @classmethod
    def to(cls, model: TransformerConfig, base_dim: int | None, base_depth: int | None) -> Transfer | None:
        """The transfer to a model from a base width, a base depth or both; None without either."""
        if base_dim is None and base_depth is None:
            return None
        depths = (None, None) if base_depth is None else (base_depth, model.depth)
        return cls(model.dim if base_dim is None else base_dim, model.dim, *depths)

    @property
    def same_width(self) -> bool:
        return self.dim == self.base_dim

    @property
    def growth(self) -> float:
        """m: how many times wider than the base."""
        return self.dim / self.base_dim

    def design(self, model: TransformerConfig) -> TransformerConfig:
        """The model to build: that of the configuration with the scheme's rule for the depth applied."""
        if self.base_depth is None or self.depth is None:
            return model
        if model.depth != self.depth:
            raise NormLabError(f"transfer: made for depth {self.depth}, but the model's is {model.depth}")
        return dataclasses.replace(model, scheme=model.scheme_object.at_depth(self.base_depth, self.depth))

    @torch.no_grad()
    def init_(self, model: Transformer) -> Transformer:
        """Rescale the matrices that `model.init_()` has initialised, and attach the factor on tied logits."""
        self.attach_(model)
        if self.same_width:
            return model
        base = self._base_model(model)
        for role, at_base in zip(model.find_roles(), base.find_roles(), strict=True):
            if role.is_matrix:
                with role.edit() as weight:
                    weight.mul_(self._wanted(role) / _own_growth(role, at_base, model, base))
        model.after_step()
        return model

    def attach_(self, model: Transformer) -> Transformer:
        """Divide the logits of a tied head by m. Not part of the weights: a model that is read back needs it again."""
        self._check(model)
        head = model.head
        if self.same_width or head.weight is not None:
            return model
        if head.logit_scale is None:
            head.accept("logit-scale", ConstantScale(1.0 / self.growth).to(next(model.parameters()).device))
        elif not (isinstance(head.logit_scale, ConstantScale) and head.logit_scale.value == 1.0 / self.growth):
            raise NormLabError("transfer: the tied head's logit scale is taken; set tied=False for a head of its own")
        return model

    def rates(self, model: Transformer, rule: Rule = "adamw") -> dict[str, float]:
        """The factor on the learning rate of every parameter, by name."""
        self._check(model)
        if self.same_width:
            return {name: 1.0 for name, _ in model.named_parameters()}
        base = self._base_model(model)
        pairs = zip(model.find_roles(), base.find_roles(), strict=True)
        return {role.name: self._rate(role, at_base, model, base, rule) for role, at_base in pairs}

    def epsilons(self, model: Transformer) -> dict[str, float]:
        """The factor on AdamW's ε for every parameter, by name: that by which gradients inside blocks shrink."""
        self._check(model)
        inside = 1.0 / (self.growth * self._branch_division(model))
        return {name: inside if name.startswith(_BLOCKS) else 1.0 for name, _ in model.named_parameters()}

    def _branch_division(self, model: Transformer) -> float:
        """What the scheme divides branch outputs by, relative to the base depth."""
        if self.base_depth is None or self.depth is None:
            return 1.0
        scheme = model.stack.scheme
        return scheme.at_depth(self.base_depth, self.depth).cut / scheme.cut

    def _rate(self, role: Role, at_base: Role, model: Transformer, base: Transformer, rule: Rule) -> float:
        if not role.is_matrix:
            return _raw_size(model, role) / _raw_size(base, at_base)
        if role.role in HIDDEN:
            learned = self.growth ** (-1.0 if rule == "adamw" else -0.5)
        else:
            learned = 1.0 / self.growth if role.role in _READOUT else 1.0
        if not _is_pinned(role, model.stack.bound):
            return learned
        return learned * _own_growth(role, at_base, model, base) / self._wanted(role)

    def _wanted(self, role: Role) -> float:
        """Initial std of a matrix over that at the base width, by the table."""
        if role.role in HIDDEN:
            return self.growth**-0.5
        return 1.0 / self.growth if role.role in _READOUT else 1.0

    def _base_model(self, model: Transformer) -> Transformer:
        """The same model at the base width, on the meta device."""
        return self._base_config(model.config).build(device="meta")

    def _base_config(self, config: TransformerConfig) -> TransformerConfig:
        kv_heads = config.kv_heads or config.heads
        few = self._narrow(kv_heads)
        return dataclasses.replace(
            config,
            dim=self.base_dim,
            heads=few * (config.heads // kv_heads),
            kv_heads=few,
            head_dim=config.width_of_head,
            hidden=self._narrow(config.width_of_mlp),
            shared_hidden=self._narrow(config.shared_hidden) if config.shared_hidden else 0,
        )

    def _narrow(self, size: int) -> int:
        return max(1, round(size / self.growth))

    def _check(self, model: Transformer) -> None:
        if model.config.dim != self.dim:
            raise NormLabError(f"transfer: made for width {self.dim}, but the model's is {model.config.dim}")
        if self.depth not in (None, model.config.depth):
            raise NormLabError(f"transfer: made for depth {self.depth}, but the model's is {model.config.depth}")


def _own_growth(role: Role, at_base: Role, model: Transformer, base: Transformer) -> float:
    """How the scheme's own initial std changes from the base width to this one."""
    std = _own_std(at_base, base)
    return _own_std(role, model) / std if std else 1.0


def _own_std(role: Role, model: Transformer) -> float:
    bound, given = model.stack.bound, model.config.init_std
    return bound.initial_std(role, bound.scheme.base_std(bound.dim) if given is None else given)


def _is_pinned(role: Role, bound: BoundScheme) -> bool:
    """Whether the scheme's constraint undoes a change of a matrix's size: tried on a small one."""
    if not bound.constrains:
        return False
    small = torch.eye(4) + 0.5
    one, other = nn.Parameter(small.clone()), nn.Parameter(3.0 * small)
    for parameter in (one, other):
        bound.after_step([dataclasses.replace(role, parameter=parameter, start=0, length=None)])
    return torch.allclose(one, other)


def _raw_size(model: Transformer, role: Role) -> float:
    """The raw magnitude at which a scheme stores a learned scale, relative to which an optimiser step acts."""
    owner = model.get_submodule(role.name.rpartition(".")[0])
    return abs(owner.scaling) if isinstance(owner, LearnedScale) else 1.0
