"""Certificates: proven upper bounds of the hidden state at every block boundary, compared with a real forward pass.

A scheme's parts know their bounds (`Block.rms_bound`), branches have theirs from spectral norms (`branch_bound`), and
the composition bounds the RMS of every token at every block boundary, whatever the tokens are. A measured state above
its bound is a bug in the model or in the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.checks.judge.blame import blocks as named
from normlab.checks.theory.branch_bounds import branch_bound
from normlab.checks.theory.mixing import MixingGain, MixingWatch, widest
from normlab.checks.theory.records import Kind, Segment
from normlab.checks.theory.scheme_stack import boundary
from normlab.models.tokens import TokenModel
from normlab.norms import rms
from normlab.probes.blocks import eager
from normlab.probes.sharded import whole, whole_vectors
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of

if TYPE_CHECKING:
    from normlab.checks.theory.scheme_stack import SchemeStack

_ROUNDINGS = 16
"""Roundings around a step that are not the state's own: in sums of squares, in products, in what is measured."""

_ALIKE = 1e-9

GOAL = 10.0
"""RMS of the state for which a residual step is named, where the scheme has one: the size of a trained Pre-Norm stack
of 48 blocks.
"""


@dataclass(frozen=True)
class Certificate:
    """Upper bounds on the RMS of every token."""

    curve: list[float]
    """Bound after the entry and after every block; infinite if there is none."""
    segments: tuple[Segment, ...]
    words: str
    slopes: dict[str, list[float]]
    """Λ_k of each of a block's branches, for an input as the scheme's norms can leave it, or of RMS 1 without one."""


def certify(stack: SchemeStack, entry: float) -> Certificate:
    """The certificate of a stack whose embedding has an RMS of at most `entry`."""
    with whole_vectors(stack):
        branches = [[branch_bound(eager(branch)) for branch in layer.branches] for layer in stack.layers]  # type: ignore[union-attr]
        curve = [_known(bound) for bound in stack.certificate(entry, branches)]
        segments = _segments(stack, curve, branches)
        return Certificate(curve, segments, _words(stack, curve, segments), _slopes(stack, branches))


def entry_bound(model: nn.Module, measured: float) -> float:
    """Largest RMS of an embedding: over the whole table for NormLab's models, else as measured."""
    model = eager(model)
    return float(rms(whole(model.embedding.weight.detach())).max()) if isinstance(model, TokenModel) else measured


@dataclass
class Observation:
    """Measurements of one forward pass through a stack."""

    pooled: list[float]
    """RMS over all tokens at each boundary; NaN if a value is not finite."""
    largest: list[float]
    """RMS of the largest token."""
    entry: float
    """RMS of the largest token before the scheme's entry."""
    drift: float | None
    """Largest relative change of a token's length since the entry, if the scheme preserves it."""
    clamped: list[float]
    """Share of tokens whose step was clamped, by block; empty if nothing clamps."""
    slack: float
    """Relative excess over a bound that rounding alone can cause."""
    mixing: MixingGain | None
    """Gain of mixing several streams; None if there is one stream."""


def observe(stack: SchemeStack, run: Callable[[], Any]) -> Observation:
    """Measure the state during `run`, a forward pass through the stack."""
    with ExitStack() as hooks, torch.no_grad():
        watch = _Watch(stack, MixingWatch(stack))
        watch.listen(hooks)
        run()
    return watch.observation()


@dataclass
class _Watch:
    stack: SchemeStack
    mixing: MixingWatch
    states: list[torch.Tensor] = field(default_factory=list)
    """(pooled RMS, largest token's RMS, largest drift) at each boundary."""
    entering: torch.Tensor | None = None
    first: torch.Tensor | None = None
    stream: torch.dtype = torch.float32
    branch: torch.dtype = torch.float32
    clamps: list[list[torch.Tensor]] = field(default_factory=list)

    def listen(self, hooks: ExitStack) -> None:
        layers: list[Any] = list(self.stack.layers)
        self.mixing.listen(hooks)
        hooks.callback(self.stack.entry.register_forward_pre_hook(self._enter).remove)
        hooks.callback(self.stack.entry.register_forward_hook(self._note).remove)
        hooks.callback(layers[0].block.steps[0].shape.register_forward_pre_hook(self._hear_branch).remove)
        self.clamps = [[] for _ in layers]
        for layer, shares in zip(layers, self.clamps, strict=True):
            hooks.callback(boundary(layer).register_forward_hook(self._note).remove)
            for step in layer.block.steps:
                hooks.callback(step.write.register_forward_hook(partial(_note_clamp, shares)).remove)

    def _enter(self, _entry: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.entering = rms(widest(args[0])).max()

    def _hear_branch(self, _shape: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.branch = args[0].dtype

    def _note(self, _module: nn.Module, _args: Any, state: torch.Tensor) -> None:
        sizes = rms(widest(self.stack.hidden(state))).squeeze(-1)
        self.stream = state.dtype
        self.first = sizes if self.first is None else self.first
        # A token without length has none to keep.
        change = torch.where(self.first > 0, sizes / self.first - 1.0, 0.0).abs()
        self.states.append(torch.stack([sizes.square().mean().sqrt(), sizes.max(), change.max()]))

    def observation(self) -> Observation:
        pooled, largest, drifts = torch.stack(self.states).T.tolist()
        clamps = [torch.stack(shares).mean().item() for shares in self.clamps if shares]
        return Observation(
            pooled=pooled,
            largest=largest,
            entry=largest[0] if self.entering is None else float(self.entering),
            drift=max(drifts) if keeps_norm(self.stack) else None,
            clamped=clamps,
            slack=_slack(self.stack, self.stream, self.branch),
            mixing=self.mixing.found(),
        )


def keeps_norm(stack: SchemeStack) -> bool:
    """Whether every write of the stack preserves the length of tokens."""
    return all(step.write.keeps_norm for layer in stack.layers for step in layer.block.steps)  # type: ignore[union-attr]


def _note_clamp(shares: list[torch.Tensor], write: Any, args: tuple[torch.Tensor, ...], _state: Any) -> None:
    # A read may hand further tensors to its write.
    marks = write.clamped(*args[:2])
    if marks is not None:
        shares.append(marks.float().mean())


def _slack(stack: SchemeStack, stream: torch.dtype, branch: torch.dtype) -> float:
    """(1 + u)^k − 1 for as many roundings as can pile up: one of the state a step, and those inside a step once.

    What a branch returns is rounded in its own format, and never piles up: each step has a branch of its own.
    """
    steps = sum(len(layer.block.steps) for layer in stack.layers)  # type: ignore[union-attr, arg-type]
    own = (steps + _ROUNDINGS) * math.log1p(torch.finfo(stream).eps / 2)
    return math.expm1(own + _ROUNDINGS * math.log1p(torch.finfo(branch).eps / 2))


def _segments(
    stack: SchemeStack, curve: Sequence[float], branches: Sequence[Sequence[BranchBound]]
) -> tuple[Segment, ...]:
    kinds: list[Kind] = [
        _kind(partial(layer.block.rms_bound, branches=bounds))  # type: ignore[union-attr]
        for layer, bounds in zip(stack.layers, branches, strict=True)
    ]
    segments = []
    for _, run in groupby(range(len(kinds)), key=lambda place: kinds[place]):
        places = list(run)
        kind = kinds[places[0]]
        words = _segment_words(kind, places, curve)
        segments.append(Segment(first=places[0], last=places[-1], kind=kind, words=words))
    return tuple(segments)


def _kind(bound: Callable[[float], float]) -> Kind:
    """How a block changes the bound of its input."""
    if math.isfinite(_known(bound(math.inf))):
        return "resets"
    once, twice = _known(bound(1.0)), _known(bound(2.0))
    if math.isinf(once):
        return "unbounded"
    if abs(once - 1.0) <= _ALIKE and abs(twice - 2.0) <= _ALIKE:
        return "keeps"
    return "adds" if abs(twice - once - 1.0) <= _ALIKE * once else "multiplies"


def _segment_words(kind: Kind, places: Sequence[int], curve: Sequence[float]) -> str:
    who, many = named(places, len(curve) - 1), len(places) > 1
    before, after = curve[places[0]], curve[places[-1] + 1]
    # The bound at the top is said before all segments.
    reached = f", up to {after:.4g}" if places[-1] + 2 < len(curve) else ""
    match kind:
        case "resets":
            largest = max(curve[place + 1] for place in places)
            return f"{who} put{'' if many else 's'} the RMS at {largest:.4g} or below, whatever came before"
        case "keeps":
            return f"{who} leave{'' if many else 's'} the RMS as it is"
        case "adds":
            share = f"{(after - before) / len(places):.4g}{' each on average' if many else ''}"
            return f"{who} add{'' if many else 's'} at most {share}{reached}"
        case "multiplies":
            return f"{who} multipl{'y' if many else 'ies'} the RMS{reached if math.isfinite(after) else ''}"
        case _:
            return f"nothing is proven of {who}"


def _words(stack: SchemeStack, curve: Sequence[float], segments: Sequence[Segment]) -> str:
    each = "; ".join(segment.words for segment in segments)
    if all(segment.kind == "unbounded" for segment in segments):
        return f"no certificate: {each}"
    if math.isinf(curve[-1]):
        return f"no certificate at this depth, the bound is beyond every number: {each}"
    alone = math.isfinite(_known(stack.certificate(curve[0])[-1]))
    source = "from the gains alone" if alone else "from gains and spectral norms of the weights"
    return (
        f"RMS ≤ {curve[-1]:.4g} after {len(curve) - 1} blocks, {source}: {each}{_step_for_goal(stack, curve, segments)}"
    )


def _step_for_goal(stack: SchemeStack, curve: Sequence[float], segments: Sequence[Segment]) -> str:
    """The residual step for which the bound equals the goal; the blocks' increments are linear in the step."""
    step = getattr(stack.scheme, "step", None)
    adds = all(segment.kind == "adds" for segment in segments)
    if step is None or not adds or not curve[0] < GOAL < curve[-1]:
        return ""
    return f"; Δt = {step * (GOAL - curve[0]) / (curve[-1] - curve[0]):.2g} would make it {GOAL:g}"


def _slopes(stack: SchemeStack, branches: Sequence[Sequence[BranchBound]]) -> dict[str, list[float]]:
    slopes: dict[str, list[float]] = {}
    layers: list[Any] = list(stack.layers)
    for layer, bounds in zip(layers, branches, strict=True):
        names = _names([eager(branch) for branch in layer.branches])
        for name, step, bound in zip(names, layer.block.steps, bounds, strict=True):
            seen = _known(rms_bound_of(step.read, math.inf))
            slopes.setdefault(name, []).append(_known(bound(seen if math.isfinite(seen) else 1.0)))
    return {name: values for name, values in slopes.items() if any(map(math.isfinite, values))}


def _names(branches: Sequence[nn.Module]) -> list[str]:
    names = [type(branch).__name__.lower() for branch in branches]
    return [name if names.count(name) == 1 else f"{name} {place + 1}" for place, name in enumerate(names)]


def _known(bound: float) -> float:
    """A bound that is NaN (weights that are not finite, 0 · ∞) becomes infinite."""
    return math.inf if math.isnan(bound) else bound
