"""A scheme bound to the depth and width of a network: builds its modules and applies its rules to parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError, unknown
from normlab.roles import FRONT, OUTPUTS, Role, drawing_order
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.site import Kind, Site

if TYPE_CHECKING:
    from normlab.schemes.contract.scheme import Scheme


def usual_kinds(branches: int) -> tuple[Kind, ...]:
    """The kinds of a block's branches if nobody says: the last of several is the MLP, all others are attention."""
    last: tuple[Kind, ...] = ("mlp",) if branches > 1 else ("attention",)
    return (("attention",) * (branches - 1) + last) if branches else ()


@dataclass(frozen=True)
class BoundScheme:
    """A scheme bound to a network: builds entry, blocks and exit, initialises parameters, makes optimiser groups."""

    scheme: Scheme
    depth: int
    """Blocks in the whole network."""
    dim: int
    """Width of the residual stream."""
    first: int
    """Index of the first block of this part of the network (pipeline stages); 0 for the whole."""
    topology: Topology
    kinds: tuple[tuple[Kind, ...], ...]
    """What each branch is, for every block of the whole network: blocks may differ in the number of branches."""

    def __post_init__(self) -> None:
        who = self.scheme.name
        fewest = min(map(len, self.kinds), default=1)
        if min(self.depth, self.dim, fewest) < 1:
            sizes = f"{self.depth}, {self.dim}, {fewest}"
            raise NormLabError(f"{who}: depth, dim and branches must be at least 1, got {sizes}")
        if len(self.kinds) != self.depth:
            raise NormLabError(f"{who}: expected the branches of {self.depth} blocks, got those of {len(self.kinds)}")
        if not 0 <= self.first < self.depth:
            raise NormLabError(f"{who}: first must lie in [0, {self.depth}), got {self.first}")
        if self.topology not in get_args(Topology):
            raise unknown("topology", self.topology, get_args(Topology))
        if self.topology not in self.scheme.topologies:
            raise NormLabError(f"{who} has no {self.topology} form; use topology='serial' or another scheme, e.g. pre")

    @property
    def horizon(self) -> float:
        """Depth in whole blocks, L in the equations; differs from `depth` only for refined schemes."""
        return self.depth / self.scheme.cut

    @property
    def branches(self) -> int:
        """Branches in a block, 2 for attention and MLP; the most in any, where blocks differ."""
        return max(map(len, self.kinds))

    def branches_before(self, block: int) -> int:
        """Branches in all blocks of the whole network before one; `block` = depth counts all."""
        return sum(map(len, self.kinds[:block]))

    def steps_before(self, block: int) -> int:
        """Steps in all blocks before one: one per branch, or one per block if its branches run in parallel."""
        return self.branches_before(block) if self.topology == "serial" else block

    @property
    def sublayers(self) -> float:
        """Steps in the whole network: 2L in constants that depend on depth."""
        return self.steps_before(self.depth) / self.scheme.cut

    @property
    def updates(self) -> float:
        """Updates added to the state in the whole network: 2L in initialisation rules."""
        return self.branches_before(self.depth) / self.scheme.cut

    def output_std(self, role: Role, base: float) -> float:
        """The rule of `depth_init`: output projections ÷ √(2L), as in GPT-2, all else at the base std."""
        return base / math.sqrt(self.updates) if role.role in OUTPUTS else base

    @property
    def constrains(self) -> bool:
        """Whether `after_step` must be called after every optimiser step."""
        return self.scheme.constrains

    def entry(self) -> nn.Module:
        """A new module that turns the embedding into the first state."""
        return self.scheme.entry(self)

    def exit(self) -> nn.Module:
        """A new module that turns the last state into the head's input."""
        return self.scheme.exit(self)

    def block(self, k: int) -> Block:
        """A new module for block k of this part of the network, which is block first + k of the whole."""
        return self.scheme.block(self._sites(k), self.topology)

    def _sites(self, k: int) -> list[Site]:
        if not 0 <= k < self.depth - self.first:
            raise NormLabError(
                f"{self.scheme.name}: block {k} is out of range; "
                f"this part has blocks 0 to {self.depth - self.first - 1} (depth {self.depth}, first {self.first})"
            )
        block = self.first + k
        steps = len(self.kinds[block]) if self.topology == "serial" else 1
        place = (self.depth, self.dim, steps, self.scheme.cut)
        counts = (self.steps_before(block), self.steps_before(self.depth))
        return [Site(block, i, *place, kind, *counts) for i, kind in enumerate(self.kinds[block])]

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) hidden state in a state of the scheme, which may hold several streams."""
        return self.scheme.hidden(state)

    def law(self) -> Law:
        """The scheme's theoretical law at this depth."""
        return self.scheme.law(math.ceil(self.horizon))

    def init_(
        self,
        roles: Sequence[Role],
        *,
        std: float | None = None,
        zero_outputs: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Initialise matrices by role and set biases to zero; then apply the scheme's constraint once.

        `std` replaces the scheme's base standard deviation. With `zero_outputs` output projections start at zero.
        """
        if zero_outputs and not self.scheme.zero_outputs:
            raise NormLabError(
                f"{self.scheme.name} normalises what a branch returns, so output projections must not start at zero; "
                f"leave zero_outputs off"
            )
        base = self.scheme.base_std(self.dim) if std is None else std
        for role in drawing_order(roles):
            if role.role == "bias":
                nn.init.zeros_(role.parameter)
            elif role.is_matrix:
                zero = zero_outputs and role.role in OUTPUTS
                self._normal_(role, 0.0 if zero else self.initial_std(role, base), generator)
        self.after_step(roles)

    def initial_std(self, role: Role, base: float) -> float:
        """Initial standard deviation of a matrix: the scheme's, or 1 for patch and position embeddings."""
        # Unit patches and unit positions under every scheme: with small ones the first block alone would determine the
        # state, and without a causal mask its output is the same for every token. Small positions would be negligible
        # beside the patches.
        return 1.0 if role.role in FRONT else self.scheme.initial_std(role, base, self)

    def _normal_(self, role: Role, std: float, generator: torch.Generator | None) -> None:
        cut = self.scheme.truncate
        with role.edit() as weight:
            if std == 0.0:
                weight.zero_()
            elif cut is None:
                weight.normal_(0.0, std, generator=generator)
            else:
                nn.init.trunc_normal_(weight, 0.0, std, -cut * std, cut * std, generator=generator)

    def param_groups(self, roles: Sequence[Role], *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, with learning rate and weight decay; every parameter is in exactly one."""
        rules: dict[int, tuple[nn.Parameter, bool, float, float]] = {}
        for role in roles:
            decay = self.scheme.weight_decay(role, weight_decay)
            rule = (role.parameter, self.scheme.decays(role) or decay != 0.0, decay, self.scheme.lr_scale(role))
            known = rules.setdefault(id(role.parameter), rule)
            if known[1:] != rule[1:]:
                raise NormLabError(f"{role.name}: parts of one parameter ask for different optimiser rules; split it")
        groups: dict[tuple[bool, float, float], dict[str, Any]] = {}
        for parameter, decays, decay, scale in rules.values():
            own = "" if decay in (0.0, weight_decay) else f" {decay:g}"
            empty: dict[str, Any] = {
                "name": ("decay" if decays else "no-decay") + own + ("" if scale == 1.0 else f" lr×{scale:g}"),
                "params": [],
                "lr": lr * scale,
                "weight_decay": decay,
            }
            groups.setdefault((decays, decay, scale), empty)["params"].append(parameter)
        return list(groups.values())

    @torch.no_grad()
    def after_step(self, roles: Sequence[Role]) -> None:
        """Apply the scheme's constraint to the parameters; call it after every optimiser step."""
        self.scheme.constrain_(roles)
