"""Blocks: how the steps of one block are wired, one after the other or side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from normlab.errors import NormLabError
from normlab.schemes.contract.parts import Branch, BranchBound, Step, Write, call_branch, read_state, rms_bound_of


class Block(nn.Module):
    """The steps of one block. `forward(state, branches)` takes one callable per step and returns the next state.

    Inside, a block enters (its first branch's input beside the state) and runs. The two are apart so that a stack may
    let the last write of a block settle together with the first norm of the next.
    """

    kernels: str = "auto"
    """Which kernels its steps may use: auto, reference or triton."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @property
    def branches(self) -> int:
        return len(self.steps)

    @property
    def first_read(self) -> nn.Module:
        """What stands between the block's input and its first branch."""
        return self.steps[0].read  # pyright: ignore[reportReturnType]  # ModuleList forgets types

    def pairs(self, branches: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """(step, branch), refused in one line where their numbers differ."""
        if len(branches) != self.branches:
            raise NormLabError(f"this block steps through {self.branches} branches, got {len(branches)}")
        return zip(self.steps, branches, strict=True)

    def forward(self, state: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        state, seen = read_state(state, self.first_read, self.usable_kernels())
        return self.run(state, seen, branches, nn.Identity())[0]

    def run(
        self, state: torch.Tensor, seen: torch.Tensor, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From (state, the first branch's input) to (next state, what `after` makes of it)."""
        raise NotImplementedError

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        """Largest RMS of the block's output, given the largest of its input and a bound for each branch."""
        return math.inf

    def reads(self, after: nn.Module) -> list[nn.Module]:
        """What each step's result is read through: the next step's read, and `after` at the end."""
        return [*(step.read for step in self.steps[1:]), after]  # type: ignore[union-attr]

    def usable_kernels(self) -> str:
        """A hook on a part must see what passes through it, so such a block runs part by part."""
        if torch.compiler.is_compiling() or self.kernels == "reference" or not has_hooks(self):
            return self.kernels
        return "reference"


def has_hooks(module: nn.Module) -> bool:
    """Whether anyone listens to the module, to a part of it, or to all modules there are."""
    return bool(_has_any_global_hook()) or any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        # Libraries that move a module's inputs between devices put their own method in place of its forward.
        or "forward" in vars(part)
        for part in module.modules()
    )


class SerialBlock(Block):
    """One step after the other: the MLP sees what attention did."""

    def run(
        self, state: torch.Tensor, seen: torch.Tensor, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self.usable_kernels()
        for (step, branch), read in zip(self.pairs(branches), self.reads(after), strict=True):
            state, seen = step.write.write_and_read(state, call_branch(branch, seen), step.shape, read, kernels)
        return state, seen

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        for step, branch in self.pairs(branches):
            state = step.rms_bound(state, branch)
        return state


class ParallelBlock(Block):
    """All branches at the same state, one write of the sum of their updates.

    Each branch keeps its own read and shape; of the writes only the first is kept, so no parameter is left unused.
    """

    shares_read = False
    """Whether all branches read what the first does."""

    def share_read(self) -> None:
        """One norm before all branches, as in GPT-J."""
        self.shares_read = True
        for step in self.steps[1:]:
            step.read = nn.Identity()

    def __init__(self, steps: list[Step]):
        for step in steps[1:]:
            step.write = Write()
        super().__init__(steps)

    def run(
        self, state: torch.Tensor, seen: torch.Tensor, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        updates = [
            step.shape(call_branch(branch, seen if step is self.steps[0] or self.shares_read else step.read(state)))
            for step, branch in self.pairs(branches)
        ]
        total = sum(updates[1:], start=updates[0])
        return self.steps[0].write.write_and_read(state, total, nn.Identity(), after, self.usable_kernels())  # type: ignore

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        if self.shares_read:
            read = rms_bound_of(self.first_read, state)
            update = sum(rms_bound_of(step.shape, branch(read)) for step, branch in self.pairs(branches))
        else:
            update = sum(step.update_bound(state, branch) for step, branch in self.pairs(branches))
        return self.steps[0].write.rms_bound(state, update)  # type: ignore[union-attr]
