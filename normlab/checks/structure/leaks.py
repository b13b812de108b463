"""Find leaks: outputs that change with a later token (causality) or with another sample of the batch.

The first state of the model (what the first module returns for all tokens) is perturbed, for the later half of all
sequences or for one sample, and the model runs again with the same random numbers. Where tokens that must not see the
change move with it, the first module is named whose inputs had not changed for them and whose output has. A small
perturbation does not change which experts tokens are sent to: routing with a limited capacity depends on other tokens
by design, in jumps, and is not reported.

The future is tested where tokens are predicted one after the other, batches in every model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normlab.norms import widen
from normlab.probes.attention import Rows, watch_attention
from normlab.probes.blocks import BlockStack, eager, walk
from normlab.probes.outputs import tensors

Kind = Literal["future", "batch"]

MOVE = 1e-3
"""Relative change of the first state: too small to send tokens to other experts, large enough for fp32."""

_ROUNDING = 1e-7
"""Relative change that counts as rounding."""


@dataclass(frozen=True)
class Leak:
    """Largest change of tokens that must not change, relative to the perturbation, and the module at fault."""

    kind: Kind
    share: float
    module: str
    """Path of the module that leaks."""
    is_batch_norm: bool = False
    """Whether it is torch's batch norm, which mixes samples by design, in training mode only."""


Heard = tuple[str, nn.Module, list[Tensor], list[Tensor]]
"""One call of a module: (path, module, inputs, outputs) of the tokens that must not change."""


@dataclass(frozen=True)
class TokenSlices:
    """Slices of a tensor (B, T, ...): the perturbed tokens, and those that must not change."""

    kind: Kind
    samples: int
    length: int | None

    def fits(self, x: Tensor) -> bool:
        if x.ndim < 2 or x.shape[0] != self.samples:
            return False
        return self.kind == "batch" or (x.ndim >= 3 and x.shape[1] == self.length)

    def moved(self, x: Tensor) -> Tensor:
        return x[:1] if self.kind == "batch" else x[:, x.shape[1] // 2 :]

    def watched(self, x: Tensor) -> Tensor:
        return x[-1:] if self.kind == "batch" else x[:2, : x.shape[1] // 2]


@torch.no_grad()
def find_leak(
    model: nn.Module, stacks: Sequence[BlockStack], run: Callable[[], Any], tokens: TokenSlices, limit: float
) -> Leak | None:
    """The leak of one kind in the pass that `run` makes; one of share 0 where there is none, None if nothing is seen.

    The model is in training mode, as it is trained: batch norms mix samples there alone.
    """
    paths = [path for path, _ in walk(eager(model), "")]
    ends = _ends(paths, stacks)
    leak = _leak(model, run, tokens, ends, draw=1)
    if leak is None or leak.share <= limit:
        return leak
    # A token that was on the brink between two experts moves others once, and not with another change.
    again, named = (_leak(model, run, tokens, places, draw=2) for places in (ends, paths))
    if again is None or named is None:
        return None
    return Leak(tokens.kind, min(leak.share, again.share), named.module, named.is_batch_norm)


def _ends(paths: Sequence[str], stacks: Sequence[BlockStack]) -> list[str]:
    """The last block of every stack and the modules outside of all: what leaks in a block shows there."""
    outside = [path for path in paths if all(stack.block_of(path) is None for stack in stacks)]
    return [*outside, *(stack.names[-1] for stack in stacks)]


def _leak(
    model: nn.Module, run: Callable[[], Any], tokens: TokenSlices, places: Collection[str], *, draw: int
) -> Leak | None:
    base, other = (_recorded(model, run, tokens, set(places), number) for number in (0, draw))
    return _compared(base, other, tokens) if base and len(base) == len(other) else None


@torch.no_grad()
def hides_later_keys(model: nn.Module, run: Callable[[], Any]) -> list[bool]:
    """For each call of attention in a pass whether no query but the last sees the last key."""
    found: list[bool] = []

    def hear(rows: Rows) -> None:
        if rows.visible.shape[-1] > 2 and rows.visible.shape[-2] > 2:
            found.append(bool((rows.visible[..., -1].sum(-1) <= 1).all()))

    with torch.random.fork_rng(devices=[]), watch_attention(hear):
        run()
    return found


def _recorded(
    model: nn.Module, run: Callable[[], Any], tokens: TokenSlices, places: Collection[str], draw: int
) -> list[Heard]:
    """The calls of the modules at `places` in a pass with the first state moved by noise number `draw`; 0: as it is."""
    calls: list[Heard] = []
    waiting = [True]

    def hear(path: str):
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if waiting[0] and isinstance(output, Tensor) and output.is_floating_point() and tokens.fits(output):
                waiting[0] = False
                return _move(output, tokens, draw) if draw else None
            if path in places:
                given, made = (_kept(part, tokens) for part in ((args, kwargs), output))
                calls.append((path, module, given, made))
            return None

        return keep

    with torch.random.fork_rng(devices=[]), ExitStack() as hooks:
        torch.manual_seed(0)
        for path, module in walk(eager(model), ""):
            hooks.callback(module.register_forward_hook(hear(path), with_kwargs=True).remove)
        run()
    return calls


def _move(x: Tensor, tokens: TokenSlices, draw: int) -> Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(draw)).to(x)
    changed = x.clone()
    tokens.moved(changed).add_(MOVE * x.float().square().mean().sqrt().to(x) * tokens.moved(noise))
    return changed


def _kept(values: Any, tokens: TokenSlices) -> list[Tensor]:
    return [tokens.watched(x).detach().clone() for x in tensors(values) if tokens.fits(x)]


def _compared(base: list[Heard], other: list[Heard], tokens: TokenSlices) -> Leak:
    """The first module that leaks, and the largest change of a token that must not change."""
    guilty, largest = ("", False), 0.0
    for (path, module, given, made), (_, _, given_too, made_too) in zip(base, other, strict=True):
        move = _largest_move(made, made_too)
        largest = max(largest, move)
        if not guilty[0] and move > _ROUNDING and _largest_move(given, given_too) <= _ROUNDING:
            guilty = path, isinstance(module, _BatchNorm)
    return Leak(tokens.kind, largest / MOVE, *guilty)


def _largest_move(before: list[Tensor], after: list[Tensor]) -> float:
    return max((_move_of(a, b) for a, b in zip(before, after, strict=False) if a.shape == b.shape), default=0.0)


def _move_of(before: Tensor, after: Tensor) -> float:
    a, b = widen(before), widen(after)
    size = float(a.square().mean().sqrt())
    return float((b - a).square().mean().sqrt()) / size if size > 0.0 else 0.0
