"""Stack: anyone's sublayers under any scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.choices import Kernels, Topology
from normlab.errors import NormLabError
from normlab.roles import Role, Spec, find_roles
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.blocks import Block, has_hooks
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.needs import meet_needs
from normlab.schemes.contract.parts import Branch, BranchBound, read_state, rms_bound_of, unbounded
from normlab.schemes.contract.scheme import Scheme
from normlab.utils.uninitialized import NaNUntilInitialised, require_initialised


class Layer(nn.Module):
    """One block of the scheme with the branches it steps through. The unit that is compiled and checkpointed."""

    def __init__(self, block: Block, branches: Sequence[nn.Module]):
        super().__init__()
        self.block = block
        self.branches = nn.ModuleList(branches)

    def forward(self, state: torch.Tensor, **to_first: Any) -> torch.Tensor:
        return self.block(state, self._calls(to_first))

    def run(
        self, state: torch.Tensor, seen: torch.Tensor, after: nn.Module, **to_first: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a stack that lets the last write wait for `after`, which reads it."""
        return self.block.run(state, seen, self._calls(to_first), after)

    def _calls(self, to_first: Mapping[str, Any]) -> list[Branch]:
        first, *rest = self.branches
        return [partial(first, **to_first), *rest]


class Stack(NaNUntilInitialised):
    """A Transformer's residual stack: `stack(x, **to_attention)` returns the hidden states after the exit.

    `blocks` holds one tuple of modules per block (attention, MLP, ...), each of them tensor in, update out. Keyword
    arguments of a call go to the first module of every block; `per_block` adds some for each block alone (caches).

        stack = normlab.Stack("geonorm", [(attention, mlp) for ...], dim=768)
        stack.init_()
        optimiser = torch.optim.AdamW(stack.param_groups(lr=1e-3, weight_decay=0.1))
        ...
        optimiser.step(); stack.after_step()

    A part of a longer stack (a pipeline stage) says where it begins and how deep the whole is: `first=12, depth=48`.
    Entry and exit then belong to the first and the last part alone.
    """

    def __init__(
        self,
        scheme: str | Scheme,
        blocks: Sequence[Sequence[nn.Module]],
        dim: int,
        *,
        depth: int | None = None,
        first: int = 0,
        topology: Topology = "serial",
        residual_only: bool = False,
        checkpointing: bool = False,
        roles: Mapping[str, Spec] | None = None,
        kernels: Kernels = "auto",
    ):
        super().__init__()
        branches = _branch_count(blocks)
        whole = first + len(blocks) if depth is None else depth
        self.bound = find_scheme(scheme).bind(depth=whole, dim=dim, first=first, topology=topology, branches=branches)
        if first + len(blocks) > whole:
            raise NormLabError(f"{len(blocks)} blocks from block {first} on do not fit into a depth of {whole}")
        self.checkpointing = checkpointing
        self.checkpoint_with: Callable[..., torch.Tensor] = partial(checkpoint, use_reentrant=False)  # type: ignore
        self._given_roles = dict(roles or {})
        self.entry = self.bound.entry() if first == 0 else nn.Identity()
        self.layers = nn.ModuleList(Layer(self.bound.block(k), modules) for k, modules in enumerate(blocks))
        self.exit = self.bound.exit() if first + len(blocks) == whole else nn.Identity()
        self.kernels = kernels
        for layer in self.layers:
            # Sublayers of ours have a choice of kernels, too; others do as they like.
            for part in (layer.block, *(branch for branch in layer.branches if hasattr(branch, "kernels"))):  # type: ignore
                part.kernels = kernels  # type: ignore[assignment]
        if not residual_only:
            self._meet_needs(blocks)

    @property
    def scheme(self) -> Scheme:
        return self.bound.scheme

    @property
    def dim(self) -> int:
        return self.bound.dim

    @property
    def made(self) -> list[nn.Module]:
        """The scheme's own modules: all but the branches."""
        return [self.entry, *(layer.block for layer in self.layers), self.exit]  # type: ignore[list-item]

    def forward(
        self,
        x: torch.Tensor,
        *,
        per_block: Sequence[Mapping[str, Any]] | None = None,
        states: list[torch.Tensor] | None = None,
        **to_attention: Any,
    ) -> torch.Tensor:
        """What the exit makes of x. The list `states` is given the state after the entry and after every layer."""
        if self.bound.first == 0 and x.shape[-1] != self.dim:
            raise NormLabError(f"the stack has width {self.dim}, got a tensor of shape {tuple(x.shape)}")
        state = self.entry(x)
        extras = [
            to_attention if per_block is None else {**to_attention, **per_block[k]} for k in range(len(self.layers))
        ]
        if states is None and self._may_wait():
            return self._run_on(state, extras)
        for layer, extra in zip(self.layers, extras, strict=True):
            if states is not None:
                states.append(state)
            state = self._run(layer, state, extra)
        if states is not None:
            states.append(state)
        return self.exit(state)

    def _may_wait(self) -> bool:
        """Whether a block's last write may settle with the next block's first norm: not where somebody looks at, wraps
        or stores what a layer returns.
        """
        if self.checkpointing or any(layer._compiled_call_impl is not None for layer in self.layers):
            return False
        return torch.compiler.is_compiling() or not has_hooks(self.layers)

    def _run_on(self, state: torch.Tensor, extras: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        blocks = [layer.block for layer in self.layers]
        afters = [*(block.first_read for block in blocks[1:]), self.exit]  # type: ignore[union-attr]
        state, seen = read_state(state, blocks[0].first_read, self.kernels)  # type: ignore[arg-type, union-attr]
        for layer, after, extra in zip(self.layers, afters, extras, strict=True):
            state, seen = layer.run(state, seen, after, **extra)  # type: ignore[operator]
        return seen

    def _run(self, layer: nn.Module, state: torch.Tensor, extra: Mapping[str, Any]) -> torch.Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return self.checkpoint_with(partial(layer, **extra), state)
        return layer(state, **extra)

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) tensor in a state between two layers."""
        return self.bound.hidden(state)

    def find_roles(self) -> list[Role]:
        """The role of every parameter in the stack; a matrix without one raises."""
        return find_roles(self, self._given_roles)

    def init_(
        self, *, std: float | None = None, zero_outputs: bool = False, generator: torch.Generator | None = None
    ) -> Stack:
        """Initialise every parameter as the scheme says: matrices by role, gains and scales by their own rule."""
        initialise_(self, self.bound, self.find_roles(), std=std, zero_outputs=zero_outputs, generator=generator)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for an optimiser, every parameter in exactly one."""
        return self.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        if self.bound.constrains:
            self.bound.after_step(self.find_roles())

    def certificate(self, entry: float = 1.0, branches: Sequence[Sequence[BranchBound]] | None = None) -> list[float]:
        """Proven bounds on the RMS of the state: after the entry, then after every block.

        `entry` bounds the RMS of the embedding. `branches` bounds every branch; without it nothing is assumed of them,
        and a scheme that does not normalise what they return has no finite bound.
        """
        bounds = [rms_bound_of(self.entry, entry)]
        for k, layer in enumerate(self.layers):
            known = [unbounded] * len(layer.branches) if branches is None else branches[k]  # type: ignore[arg-type]
            bounds.append(layer.block.rms_bound(bounds[-1], known))  # type: ignore[union-attr]
        return bounds

    def _meet_needs(self, blocks: Sequence[Sequence[nn.Module]]) -> None:
        inside = [need for need in self.scheme.needs if not need.in_head]
        for modules in blocks:
            meet_needs(inside, modules, who=self.scheme.name)


def _branch_count(blocks: Sequence[Sequence[nn.Module]]) -> int:
    counts = {len(modules) for modules in blocks}
    if len(counts) != 1 or 0 in counts:
        raise NormLabError(
            "expected one tuple of modules per block, all of the same length, e.g. [(attention, mlp), ...]; "
            f"got {len(blocks)} blocks of {sorted(counts)} modules"
        )
    return counts.pop()


def initialise_(module: nn.Module, bound: BoundScheme, roles: Sequence[Role], **options: Any) -> None:
    """Give every parameter of `module` its first value, and raise for one that has no rule to start from.

    Matrices and biases start by role, the rest by the `reset_parameters` of their modules.
    """
    made = [part for stack in module.modules() if isinstance(stack, Stack) for part in stack.made]
    with require_initialised(module, bound.scheme.name, made):
        fill_(module, bound, roles, **options)


def fill_(module: nn.Module, bound: BoundScheme, roles: Sequence[Role], **options: Any) -> None:
    """The same, unchecked."""
    matrices = {id(role.parameter) for role in roles if role.is_matrix}
    for child in module.modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        reset = getattr(child, "reset_parameters", None)
        if own and reset is not None and not any(id(p) in matrices for p in own):
            reset()
    bound.init_(roles, **options)
