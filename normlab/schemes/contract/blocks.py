"""Transformer blocks: the residual steps of one block, run serially or in parallel."""

# torch has no public way to ask for hooks.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from normlab.errors import NormLabError
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of
from normlab.schemes.contract.parts import Branch, Seen, Step, Write, call_branch, read_state, split_read


class Block(nn.Module):
    """The residual steps of one block. `forward(state, branches)` takes one callable per step, returns the next state.

    `forward` computes the first branch's input and calls `run`. The two are separate so that a stack can fuse the last
    write of a block with the first norm of the next.
    """

    kernels: str = "auto"
    """Which kernels the steps may use: auto, reference or triton."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @property
    def branches(self) -> int:
        """Number of branches that `forward` expects."""
        return len(self.steps)

    @property
    def first_read(self) -> nn.Module:
        """The module that computes the first branch's input."""
        return self.steps[0].read  # pyright: ignore[reportReturnType]  # ModuleList forgets types

    def note_casts(self, branches: Sequence[object]) -> None:
        """Note on every `read` whether its branch casts its input (`casts_input`), for `input_dtype`."""
        for step, branch in self.pairs(branches):
            casts = bool(getattr(branch, "casts_input", False))
            # Compiled code is checked anew for every module that was written to.
            if getattr(step.read, "branch_casts", None) is not casts:
                step.read.branch_casts = casts

    def pairs(self, branches: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """(step, branch) pairs; raises if there are not as many branches as steps."""
        if len(branches) != self.branches:
            raise NormLabError(f"this block steps through {self.branches} branches, got {len(branches)}")
        return zip(self.steps, branches, strict=True)

    def forward(self, state: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        if not torch.compiler.is_compiling() and any(map(own_hooks, self.steps)):
            stepped = self.run_steps(state, branches)
            if stepped is not None:
                return stepped
        state, seen = read_state(state, self.first_read, self.usable_kernels())
        return self.run(state, seen, branches, nn.Identity())[0]

    def run_steps(self, state: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor | None:
        """`forward` by calls of the steps as modules, whose hooks then fire; None if the block is no chain of steps."""
        return None

    def run(
        self, state: torch.Tensor, seen: Seen, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, Seen]:
        """Run the block from (state, what the first read returned); returns (next state, after(next state))."""
        raise NotImplementedError

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        """Largest RMS of the block's output, given the largest RMS of its input and a bound for each branch."""
        return math.inf

    def reads(self, after: nn.Module) -> list[nn.Module]:
        """The module applied after each step's write: the next step's `read`, and `after` for the last step."""
        return [*(step.read for step in self.steps[1:]), after]  # type: ignore[union-attr]

    def usable_kernels(self) -> str:
        """The kernels to use now: the reference if a module of the block has hooks, which fused kernels would skip."""
        if torch.compiler.is_compiling() or self.kernels == "reference" or not has_hooks(self):
            return self.kernels
        return "reference"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module or one of its submodules has hooks, global hooks included, or a replaced `forward`."""
    return bool(_has_any_global_hook()) or any(map(own_hooks, module.modules()))


def own_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks or a replaced `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        # Accelerate moves a module's inputs between devices by replacing its `forward`.
        or "forward" in vars(module)
    )


class SerialBlock(Block):
    """Steps one after the other: the MLP reads the state that attention has updated."""

    def run_steps(self, state: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor | None:
        for step, branch in self.pairs(branches):
            state = step(state, branch)
        return state

    def run(
        self, state: torch.Tensor, seen: Seen, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, Seen]:
        kernels = self.usable_kernels()
        for (step, branch), read in zip(self.pairs(branches), self.reads(after), strict=True):
            x, carry = split_read(seen)
            state, seen = step.write.write_and_read(state, call_branch(branch, x), step.shape, read, kernels, *carry)
        return state, seen

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        for step, branch in self.pairs(branches):
            state = step.rms_bound(state, branch)
        return state


class ParallelBlock(Block):
    """All branches read the same state; the sum of their updates is written once.

    Each branch keeps its own `read` and `shape`. Only the first step keeps its `write`, so no parameter is unused.
    """

    shares_read = False
    """Whether all branches share the first one's `read`."""

    def share_read(self) -> None:
        """Use one norm for all branches, as GPT-J does."""
        self.shares_read = True
        # The gradients of several branches are added up, in the dtype of their input.
        self.first_read.branch_casts = False  # pyright: ignore[reportArgumentType]
        for step in self.steps[1:]:
            step.read = nn.Identity()

    def __init__(self, steps: list[Step]):
        for step in steps[1:]:
            step.write = Write()
        super().__init__(steps)

    def note_casts(self, branches: Sequence[object]) -> None:
        if not self.shares_read:
            super().note_casts(branches)

    def run(
        self, state: torch.Tensor, seen: Seen, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, Seen]:
        first, carry = split_read(seen)
        inputs = [first, *(first if self.shares_read else split_read(s.read(state))[0] for s in self.steps[1:])]  # type: ignore
        updates = [
            step.shape(call_branch(branch, x)) for (step, branch), x in zip(self.pairs(branches), inputs, strict=True)
        ]
        total = sum(updates[1:], start=updates[0])
        return self.steps[0].write.write_and_read(state, total, nn.Identity(), after, self.usable_kernels(), *carry)  # type: ignore

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        if self.shares_read:
            read = rms_bound_of(self.first_read, state)
            update = sum(rms_bound_of(step.shape, branch(read)) for step, branch in self.pairs(branches))
        else:
            update = sum(step.update_bound(state, branch) for step, branch in self.pairs(branches))
        return self.steps[0].write.rms_bound(state, update)  # type: ignore[union-attr]
