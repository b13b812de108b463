"""Hooks on the blocks of one stack: measure the state at every block boundary, and its gradient.

A pass is one forward run of the stack; gradient accumulation makes several. Every call of a block is a record of its
own, so that a block which runs twice in a pass has two. Blocks that run once more in the backward pass (activation
checkpointing) are not measured again.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.probes import measures
from normlab.probes.attention import ROWS, Rows, in_backward, summarise
from normlab.probes.batched import Together, kept
from normlab.probes.blocks import BlockStack
from normlab.probes.hidden_state import sample
from normlab.probes.ledger import Ledger
from normlab.probes.measures import Like, MeasureSet
from normlab.probes.outputs import first_state, given_state, tensors
from normlab.probes.sharded import local


@dataclass
class Boundary:
    """Ledger indices of the measures at one boundary; `gradient` is empty if there was none."""

    values: dict[str, int] = field(default_factory=dict)
    """Measures of the state; `gram` and `rest_gram`, the largest tensors, of the first pass only."""
    extremes: int | None = None
    """Extremes of all entries, if the values are of a sample."""
    entries: int = 0
    gradient: dict[str, int] = field(default_factory=dict)


@dataclass
class BlockCall:
    """One call of a block."""

    block: nn.Module
    given: tuple[int, ...] = ()
    """Shape of its input state."""
    after: Boundary | None = None
    values: dict[str, int] = field(default_factory=dict)
    attention: list[dict[str, int]] = field(default_factory=list)
    """Ledger indices of the statistics of each attention call, by name."""


@dataclass
class Pass:
    """One forward pass through the stack."""

    calls: list[BlockCall] = field(default_factory=list)
    before: Boundary | None = None
    tokens: int = 0


class StackWatch:
    """Hooks on the blocks of one stack that write measures into a ledger.

    `want_gradients` asks for the gradient of the first state even if nothing before it is trained: that state requires
    a gradient until the hooks are removed. `ranked` are the boundaries whose ranks are measured; None: all.
    """

    def __init__(
        self,
        stack: BlockStack,
        ledger: Ledger,
        *,
        want_gradients: bool = False,
        measured: MeasureSet = measures.FULL,
        ranked: Collection[int] | None = None,
    ):
        self.stack, self.ledger, self.want_gradients = stack, ledger, want_gradients
        self.measured, self.ranked = measured, ranked
        self.passes: list[Pass] = []
        self.running: list[BlockCall] = []
        self._state: torch.Tensor | None = None
        """The raw state at the last boundary, its version counter, and the part of it that is measured."""
        self._version = 0
        self._seen: Like | None = None
        self._entering: tuple[torch.Tensor, int] | None = None
        self._owner_began = False
        self._owner_runs = False
        self._asked: list[torch.Tensor] = []
        self._without_gradient: list[tuple[nn.Module, Boundary]] = []
        self._ranked = Together(measured.ranked_boundary)
        self._boundaries, self._blocks = Together(measured.boundary), Together(measured.block)
        self._attention = Together(summarise)

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; closing `hooks` removes them."""
        owner = self.stack.owner
        hooks.callback(owner.register_forward_pre_hook(self._on_owner).remove)
        hooks.callback(owner.register_forward_hook(self._after_owner).remove)
        for block in dict.fromkeys(self.stack.blocks):
            hooks.callback(block.register_forward_pre_hook(self._on_block, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(self._after_block, with_kwargs=True).remove)
        hooks.callback(self._let_go)

    def attend(self, rows: Rows) -> bool:
        """Measure some rows of an attention call if it is made inside one of the blocks; returns whether it is."""
        if self.running and not _mixes_streams(rows, self.running[-1].given):
            self.running[-1].attention.append(places := {})
            self._attention.ask(self._writer(places), *rows)
        return bool(self.running)

    def finish(self) -> None:
        """Run the measurements that are still waiting."""
        for calls in self._all_calls:
            calls.finish()

    @property
    def _all_calls(self) -> tuple[Together, ...]:
        return self._ranked, self._boundaries, self._blocks, self._attention

    def _writer(self, places: dict[str, int]) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda answer: places.update(self.ledger.write_all(answer))

    def _on_owner(self, _owner: nn.Module, _args: Any) -> None:
        if not in_backward():
            self._owner_began = self._owner_runs = True

    def _after_owner(self, _owner: nn.Module, _args: Any, _output: Any) -> None:
        if not in_backward():
            self._owner_runs = False
            # The last state would keep the whole graph alive.
            self._state = self._seen = None

    def _on_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return
        state = given_state(block, args, kwargs)
        if self._starts_pass(block, list(tensors((args, kwargs)))):
            self.passes.append(Pass())
            self._forget()
            self._entering = None if state is None else (state, _version(state))
            self._ask(state)
        self._owner_began = False
        self.running.append(BlockCall(block, () if state is None else state.shape))

    def _ask(self, state: torch.Tensor | None) -> None:
        if self.want_gradients and state is not None and torch.is_grad_enabled() and not state.requires_grad:
            self._asked.append(state.requires_grad_())

    def _starts_pass(self, block: nn.Module, inputs: list[torch.Tensor]) -> bool:
        if not self.passes or self._owner_began:
            return True
        again = any(call.block is block for call in self.passes[-1].calls)
        goes_on = self._owner_runs or any(tensor is self._state for tensor in inputs)
        return again and not goes_on

    def _after_block(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            self._catch_up(block, output)
            return
        call, now = self.running.pop(), self.passes[-1]
        after = first_state(output, args, kwargs)
        with torch.no_grad(), torch.autocast(after.device.type, enabled=False):
            if now.before is None:
                now.before = self._enter(block)
                now.tokens = self.stack.hidden(after)[..., 0].numel()
            before = self._unwritten()
            call.after = self._measure(block, after, len(now.calls) + 1)
            if before is not None and self._seen is not None and before.shape == self._seen.shape:
                self._blocks.ask(self._writer(call.values), before, self._seen)
        self._state, self._version = after, _version(after)
        now.calls.append(call)

    def _enter(self, block: nn.Module) -> Boundary:
        """Measure the first boundary: the input of the first block."""
        given, self._entering = self._entering, None
        if given is None:
            return Boundary()
        self._state, self._version = given
        return self._measure(block, self._state, 0) if _version(self._state) == self._version else Boundary()

    def _measure(self, block: nn.Module, state: torch.Tensor, place: int) -> Boundary:
        hidden = local(self.stack.hidden(state.detach()))
        self._seen = kept(sample(hidden), hidden)
        boundary = Boundary(entries=hidden.numel())
        if self.measured.all_entries:
            boundary.extremes = self.ledger.write(measures.extremes(hidden))
        ranked = len(self.passes) == 1 and (self.ranked is None or place in self.ranked)
        calls = self._ranked if ranked else self._boundaries
        calls.ask(self._writer(boundary.values), self._seen)
        if state.requires_grad:
            self._await_gradient(state, boundary)
        else:
            self._without_gradient.append((block, boundary))
        return boundary

    def _unwritten(self) -> Like | None:
        """The last state, unless the block changed it in place."""
        return self._seen if self._state is not None and _version(self._state) == self._version else None

    def _await_gradient(self, state: torch.Tensor, boundary: Boundary) -> None:
        def keep(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                seen = gradient if self.measured.state_gradient else self.stack.hidden(gradient)
                boundary.gradient = self.ledger.write_all(measures.gradient(local(seen)))

        state.register_hook(keep)

    def _catch_up(self, block: nn.Module, output: Any) -> None:
        """Reentrant checkpointing first runs a block without a graph: hook the gradient when it runs again."""
        place = next((k for k in reversed(range(len(self._without_gradient))) if self._waits(k, block)), None)
        found = next((tensor for tensor in tensors(output) if tensor.requires_grad), None)
        if place is not None and found is not None:
            self._await_gradient(found, self._without_gradient.pop(place)[1])

    def _waits(self, place: int, block: nn.Module) -> bool:
        waiting, boundary = self._without_gradient[place]
        return waiting is block and all(boundary is not one.before for one in self.passes)

    def _forget(self) -> None:
        self._state = self._seen = self._entering = None
        self.running.clear()

    def _let_go(self) -> None:
        self._forget()
        self._without_gradient.clear()
        for state in self._asked:
            state.requires_grad_(False).grad = None
        self._asked.clear()

    def paths(self) -> list[str]:
        """The path of the block of every call in a pass; "(call 2)" marks a second call of one listed block."""
        listed: dict[nn.Module, list[str]] = {}
        for name, block in zip(self.stack.names, self.stack.blocks, strict=True):
            listed.setdefault(block, []).append(name)
        counts: Counter[nn.Module] = Counter()
        paths = []
        for call in self.passes[0].calls:
            names, place = listed[call.block], counts[call.block]
            paths.append(names[place] if place < len(names) else f"{names[-1]} (call {place + 1})")
            counts[call.block] += 1
        return paths

    def check(self) -> None:
        """Raise unless every block was called, equally often in every pass."""
        heard = {call.block for one in self.passes for call in one.calls}
        silent = [name for name, block in zip(self.stack.names, self.stack.blocks, strict=True) if block not in heard]
        if silent:
            raise NormLabError(
                f"probe: {', '.join(silent[:4])}{' ...' if len(silent) > 4 else ''} did not run, or unheard; expected "
                "every block to be called as a module in the step; run the model uncompiled, or name other blocks"
            )
        depths = {len(one.calls) for one in self.passes}
        if len(depths) > 1:
            raise NormLabError(f"probe: passes of {sorted(depths)} blocks cannot be pooled; probe a single pass")


def _mixes_streams(rows: Rows, state: tuple[int, ...]) -> bool:
    """Whether a softmax (B, T, S, S) is that of every token over its residual streams, of a state (B, T, S, D).

    Tokens are where heads would be. With as many tokens as streams attention may have this shape, too, if it has as
    many heads: where it hides keys, as every causal one does, it is attention.
    """
    if len(state) != 4:
        return False
    batch, tokens, streams, _ = state
    # At most so many elements of a batch are looked at.
    is_shaped = rows.scores.shape[:2] == (min(batch, ROWS), tokens) and rows.scores.shape[-1] == streams
    return is_shaped and (streams != tokens or bool(rows.visible.all()))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
