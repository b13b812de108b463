"""`Stack`: apply a scheme to your own attention and MLP modules."""

# torch annotates module lists and `checkpoint` only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.choices import Kernels, Topology
from normlab.errors import NormLabError, unknown
from normlab.roles import Role, Spec, find_roles
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.blocks import Block, has_hooks
from normlab.schemes.contract.bound_scheme import BoundScheme, usual_kinds
from normlab.schemes.contract.bounds import BranchBound, compose_bounds
from normlab.schemes.contract.needs import Need, meet_needs
from normlab.schemes.contract.parts import Branch, Seen, read_state
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Kind
from normlab.utils.uninitialized import NaNUntilInitialised, require_initialised


class Layer(nn.Module):
    """One block: the scheme's modules and its branches. The unit of compilation and activation checkpointing."""

    def __init__(self, block: Block, branches: Sequence[nn.Module]):
        super().__init__()
        self.block = block
        self.branches = nn.ModuleList(branches)
        # A block may have no attention at all; masks and caches are not for an MLP.
        self._takes_extras = _kind(branches[0]) != "mlp"

    def forward(self, state: torch.Tensor, **to_first: Any) -> torch.Tensor:
        return self.block(state, self._calls(to_first))

    def run(self, state: torch.Tensor, seen: Seen, after: nn.Module, **to_first: Any) -> tuple[torch.Tensor, Seen]:
        """Run the block from (state, what its first read returned); returns (next state, after(next state))."""
        return self.block.run(state, seen, self._calls(to_first), after)

    def _calls(self, to_first: Mapping[str, Any]) -> list[Branch]:
        first, *rest = self.branches
        return [partial(first, **to_first) if self._takes_extras else first, *rest]


class Stack(NaNUntilInitialised):
    """The residual stack of a Transformer: `stack(x, **to_attention)` returns the hidden states after the exit.

    `blocks` holds one tuple of modules per block (attention, MLP, ...); tuples may differ in length. Each module takes
    a tensor and returns the update to the residual stream. The last of several in a block is taken for its MLP, unless
    the modules say what they are: `branch_kind = "attention"` or `"mlp"`. Keyword arguments of a call go to the first
    module of every block, unless that says it is an MLP; `per_block` adds arguments for single blocks (caches).

        stack = normlab.Stack("geonorm", [(attention, mlp) for ...], dim=768)
        stack.init_()
        optimiser = torch.optim.AdamW(stack.param_groups(lr=1e-3, weight_decay=0.1))
        ...
        optimiser.step(); stack.after_step()

    For a part of a longer stack (a pipeline stage) give its first block and the depth of the whole: `first=12,
    depth=48`. Only the first part then has an entry and only the last part an exit.
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
        _check_blocks(blocks)
        if kernels not in get_args(Kernels):
            raise unknown("kernels", kernels, get_args(Kernels))
        whole = first + len(blocks) if depth is None else depth
        branches = _branches(blocks, is_part=whole != len(blocks))
        self.bound = find_scheme(scheme).bind(depth=whole, dim=dim, first=first, topology=topology, branches=branches)
        if first + len(blocks) > whole:
            raise NormLabError(f"{len(blocks)} blocks from block {first} on do not fit into a depth of {whole}")
        self.checkpointing = checkpointing
        self.checkpoint_with: Callable[..., torch.Tensor] = partial(checkpoint, use_reentrant=False)  # type: ignore
        self._run_layer = _run_layer
        self._given_roles = dict(roles or {})
        self.entry = self.bound.entry() if first == 0 else nn.Identity()
        self.layers = nn.ModuleList(Layer(self.bound.block(k), modules) for k, modules in enumerate(blocks))
        self._note_casts()
        self.exit = self.bound.exit() if first + len(blocks) == whole else nn.Identity()
        self._choose_kernels(kernels)
        self._residual_only = residual_only
        self._meet_needs(blocks)

    @property
    def scheme(self) -> Scheme:
        """The scheme."""
        return self.bound.scheme

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the scheme changes inside the branches; nothing for the residual part alone."""
        return () if self._residual_only else tuple(self.scheme.needs)

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.bound.dim

    @property
    def made(self) -> list[nn.Module]:
        """The modules that the scheme built: entry, blocks and exit, without the branches."""
        return [self.entry, *(layer.block for layer in self.layers), self.exit]  # type: ignore[list-item]

    def forward(
        self,
        x: torch.Tensor,
        *,
        per_block: Sequence[Mapping[str, Any]] | None = None,
        states: list[torch.Tensor] | None = None,
        **to_attention: Any,
    ) -> torch.Tensor:
        """Run the stack on x; appends the state after the entry and after every layer to `states`, if given."""
        self._check_input(x)
        if not torch.compiler.is_compiling():
            self._note_casts()
        state = self.entry(x)
        if per_block is not None and len(per_block) != len(self.layers):
            raise NormLabError(f"per_block: expected arguments for {len(self.layers)} blocks, got {len(per_block)}")
        extras = [
            to_attention if per_block is None else {**to_attention, **per_block[k]} for k in range(len(self.layers))
        ]
        if states is None and self._can_fuse_layers():
            return self._run_fused(state, extras)
        for layer, extra in zip(self.layers, extras, strict=True):
            if states is not None:
                states.append(state)
            state = self._run(layer, state, extra)
        if states is not None:
            states.append(state)
        return self.exit(state)

    def _choose_kernels(self, kernels: Kernels) -> None:
        self.kernels = kernels
        for layer in self.layers:
            # NormLab's own sublayers have a choice of kernels, too.
            for part in (layer.block, *(branch for branch in layer.branches if hasattr(branch, "kernels"))):  # type: ignore
                part.kernels = kernels  # type: ignore[assignment]

    def _note_casts(self) -> None:
        """Tell the scheme's blocks which branches cast their input: branches may have been replaced or wrapped."""
        for layer in self.layers:
            layer.block.note_casts(layer.branches)  # type: ignore[union-attr, arg-type]

    def _check_input(self, x: torch.Tensor) -> None:
        streams = self.scheme.streams
        if self.bound.first == 0 and x.shape[-1] != self.dim:
            raise NormLabError(f"the stack has width {self.dim}, got a tensor of shape {tuple(x.shape)}")
        if self.bound.first > 0 and streams > 1 and tuple(x.shape[-2:]) != (streams, self.dim):
            raise NormLabError(
                f"this part of the stack takes the state of the part before it, (..., {streams}, {self.dim}), "
                f"got a tensor of shape {tuple(x.shape)}"
            )
        if streams > 1 and not torch.compiler.is_compiling() and _has_sharded_width(x):
            raise NormLabError(
                f"{self.scheme.name}: {streams} streams cannot be split over their width (tensor parallelism), since "
                "their weights need whole streams; shard parameters instead (FSDP2), or use a scheme with one stream"
            )

    def _can_fuse_layers(self) -> bool:
        """Whether a block's last write may be fused with the next block's first norm.

        Not if a layer's output is observed by hooks, checkpointed, or returned by a layer that is compiled on its own.
        Compiled code drops hooks, but for those of FSDP2, which gather the layer's weights.
        """
        if self.checkpointing or any(layer._compiled_call_impl is not None for layer in self.layers):
            return False
        if torch.compiler.is_compiling():
            return not any(hasattr(layer, "unshard") for layer in self.layers)
        return not has_hooks(self.layers)

    def _run_fused(self, state: torch.Tensor, extras: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        blocks = [layer.block for layer in self.layers]
        afters = [*(block.first_read for block in blocks[1:]), self.exit]  # type: ignore[union-attr]
        state, seen = read_state(state, blocks[0].first_read, self.kernels)  # type: ignore[arg-type, union-attr]
        for layer, after, extra in zip(self.layers, afters, extras, strict=True):
            state, seen = self._run_layer(layer, state, seen, after, extra)  # type: ignore[arg-type]
        return seen  # pyright: ignore[reportReturnType]  # what the exit returned

    def _run(self, layer: nn.Module, state: torch.Tensor, extra: Mapping[str, Any]) -> torch.Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return self.checkpoint_with(partial(layer, **extra), state)
        return layer(state, **extra)

    def compile_layers(self, **options: Any) -> Stack:
        """Compile one layer for all, and the entry, in place: it takes as long as one block, not as all of them.

        Blocks that differ in their code (the last one, which is fused with the exit) get code of their own. A block's
        last write is still fused with the next block's first norm. `options` are those of torch.compile.
        """
        if not isinstance(self.entry, nn.Identity):
            # A norm of few operations, but each of them is a pass over memory, and backward another.
            self.entry.compile(**options)
        if self.checkpointing:
            for layer in self.layers:
                layer.compile(**options)
        else:
            self._run_layer = torch.compile(_run_layer, **options)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code cannot be pickled; as torch has it, neither copies nor pickles are compiled.
        return {**super().__getstate__(), "_run_layer": _run_layer}

    @property
    def is_compiled_by_layers(self) -> bool:
        """Whether one layer was compiled for all (`compile_layers`); each by itself is seen at the layers."""
        return self._run_layer is not _run_layer

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) hidden state in a state between two layers: as the exit says if it has a `hidden` of its own."""
        own: Callable[[torch.Tensor], torch.Tensor] | None = getattr(self.exit, "hidden", None)
        return self.bound.hidden(state) if own is None else own(state)

    def find_roles(self) -> list[Role]:
        """The role of every parameter in the stack; raises for a matrix without one."""
        return find_roles(self, self._given_roles)

    def init_(
        self, *, std: float | None = None, zero_outputs: bool = False, generator: torch.Generator | None = None
    ) -> Stack:
        """Initialise all parameters by the scheme's rules: matrices by role, the rest by `reset_parameters`."""
        initialise_(self, self.bound, self.find_roles(), std=std, zero_outputs=zero_outputs, generator=generator)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; every parameter is in exactly one."""
        return self.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Apply the scheme's constraint to the parameters; call it after every optimiser step."""
        if self.bound.constrains:
            self.bound.after_step(self.find_roles())

    def certificate(self, entry: float = 1.0, branches: Sequence[Sequence[BranchBound]] | None = None) -> list[float]:
        """Proven bounds on the RMS of the state, after the entry and after every block.

        `entry` is a bound on the RMS of the embedding, `branches` a bound for every branch. Without `branches` nothing
        is assumed about them, and a scheme that does not normalise their outputs has no finite bound.
        """
        return compose_bounds(self.entry, self.layers, entry, branches)

    def _meet_needs(self, blocks: Sequence[Sequence[nn.Module]]) -> None:
        inside = [need for need in self.needs if not need.in_head]
        for modules in blocks:
            # What concerns attention is not asked of a block whose modules all say that they are none.
            asked = [need for need in inside if any(_kind(module) in (None, need.kind) for module in modules)]
            meet_needs(asked, modules, who=self.scheme.name)


def _run_layer(
    layer: Layer, state: torch.Tensor, seen: Seen, after: nn.Module, extra: Mapping[str, Any]
) -> tuple[torch.Tensor, Seen]:
    return layer.run(state, seen, after, **extra)


def _has_sharded_width(x: torch.Tensor) -> bool:
    """Whether x is a DTensor whose last dimension is shared out."""
    placements: Sequence[Any] = getattr(x, "placements", ())
    return any(place.is_shard(x.ndim - 1) or place.is_shard(-1) for place in placements)


def _check_blocks(blocks: Any) -> None:
    """Refuse modules in place of tuples of modules: a Sequential would be taken for a block of its parts."""
    expected = "expected one tuple of modules per block, e.g. [(attention, mlp), ...]"
    if not isinstance(blocks, Sequence | nn.ModuleList):
        raise NormLabError(f"{expected}; got {type(blocks).__name__}; make it a list")
    for k, modules in enumerate(blocks):
        if not isinstance(modules, Sequence | nn.ModuleList):
            raise NormLabError(f"{expected}; block {k} is {type(modules).__name__}; put its modules in a tuple")
        strange = [type(module).__name__ for module in tuple[Any, ...](modules) if not isinstance(module, nn.Module)]
        if strange:
            raise NormLabError(f"{expected}; block {k} holds {strange[0]}; make it an nn.Module")


def _branches(blocks: Sequence[Sequence[nn.Module]], *, is_part: bool) -> int | list[tuple[Kind, ...]]:
    """What `bind` is told of the branches: their number, or their kinds where blocks differ or modules say so."""
    counts = {len(modules) for modules in blocks}
    if not counts or 0 in counts:
        raise NormLabError(
            "expected one tuple of modules per block, none of them empty, e.g. [(attention, mlp), ...]; "
            f"got {len(blocks)} blocks of {sorted(counts)} modules"
        )
    kinds = [_kinds(modules) for modules in blocks]
    if len(counts) == 1 and all(found == usual_kinds(len(found)) for found in kinds):
        return counts.pop()
    if is_part:
        raise NormLabError("a part of a longer stack needs blocks like (attention, mlp), all of them alike")
    return kinds


def _kinds(modules: Sequence[nn.Module]) -> tuple[Kind, ...]:
    return tuple(_kind(module) or usual for module, usual in zip(modules, usual_kinds(len(modules)), strict=True))


def _kind(module: nn.Module) -> Kind | None:
    """What a branch says it is; None if it says nothing."""
    found = getattr(module, "branch_kind", None)
    if found not in (None, *get_args(Kind)):
        raise unknown("branch_kind", str(found), get_args(Kind))
    return found


def initialise_(module: nn.Module, bound: BoundScheme, roles: Sequence[Role], **options: Any) -> None:
    """Initialise all parameters of `module`; raises for a parameter that no rule writes.

    Matrices and biases are initialised by role, the rest by the `reset_parameters` of their modules.
    """
    made = [part for stack in module.modules() if isinstance(stack, Stack) for part in stack.made]
    with require_initialised(module, bound.scheme.name, made):
        fill_(module, bound, roles, **options)


def fill_(module: nn.Module, bound: BoundScheme, roles: Sequence[Role], **options: Any) -> None:
    """`initialise_` without the check."""
    matrices = {id(role.parameter) for role in roles if role.is_matrix}
    for child in module.modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        reset = getattr(child, "reset_parameters", None)
        if own and reset is not None and not any(id(p) in matrices for p in own):
            reset()
    bound.init_(roles, **options)
