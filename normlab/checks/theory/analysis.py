"""Theory of one live model: predicted laws, certificate, slopes, scale test and Jacobians, in one record.

One batch of the target goes through the model, which is restored afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from normlab.checks.judge.blame import blocks as named
from normlab.checks.theory.branch_bounds import slopes_by_role
from normlab.checks.theory.certificates import certify, entry_bound, keeps_norm, observe
from normlab.checks.theory.jacobians import jacobian_rows
from normlab.checks.theory.mixing import MixingGain
from normlab.checks.theory.records import (
    GradientSlope,
    JacobianRow,
    Numbers,
    ScaleRow,
    Segment,
    Theory,
    TheoryLook,
    Trend,
)
from normlab.checks.theory.scale_test import scale_test, summary
from normlab.checks.theory.scheme_stack import find_stack
from normlab.errors import NormLabError
from normlab.numerics.power_law import power_law
from normlab.probes.blocks import find_stacks
from normlab.probes.profile import Number, Profile
from normlab.probes.sharded import is_sharded
from normlab.probes.untouched import at_rest
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.stack import Stack
from normlab.targets.scheme_rules import scheme_of
from normlab.targets.target import Target

if TYPE_CHECKING:
    from normlab.checks.theory.scheme_stack import SchemeStack

_NOTHING = 1e-30
_SHARDED = "no scale test and no Jacobians: weights are shared out over processes; check the model before that"

_READS_STATE = "; attention reads the state itself: scores grow with the square of it, and the gradient with them"


def theory(target: Target, model: nn.Module, profile: Profile, *, before: Theory | None = None) -> Theory:
    """Compare theory with a profile, at the model's current weights; `before` is the result from before training.

    The scale test is made once.
    """
    batch = next(iter(target.batches(profile.seed)))
    stack, run = find_stack(model), lambda: target.loss(model, batch)
    with at_rest(model):
        foreign = lambda: _foreign_theory(target, model, profile)  # noqa: E731
        found = foreign() if stack is None else _scheme_theory(model, stack, run, profile)
        if stack is not None and not isinstance(stack, Stack):
            found = _with_foreign_slopes(found, foreign())
        # Gathered weights are given back after each pass of a block: its derivatives would read what is gone.
        if is_sharded(model):
            found = dataclasses.replace(found, notes=(*found.notes, _SHARDED))
        else:
            found = _with_block_tests(found, model, target.blocks, run, profile, first=before is None)
    if before is not None:
        kept = {name: getattr(before, name) for name in ("before", "scale_test", "scale", "predicted", "notes")}
        found = dataclasses.replace(found, **kept, after=found.before, slack=max(before.slack, found.slack))
    return dataclasses.replace(found, slopes=_slope_words(found), jacobians=_jacobian_words(found))


def _scheme_theory(model: nn.Module, stack: SchemeStack, run: Callable[[], Any], profile: Profile) -> Theory:
    seen = observe(stack, run)
    proven = certify(stack, entry_bound(model, seen.entry))
    look = TheoryLook(
        step=profile.step,
        certificate=_plain(proven.curve),
        used=_shares(seen.pooled, proven.curve),
        used_by_largest=_shares(seen.largest, proven.curve),
        slopes=_slopes(proven.slopes),
        drift=None if seen.drift is None else _plain([seen.drift])[0],
        clamped=_plain(seen.clamped),
        **_mixing(seen.mixing),
    )
    return Theory(
        scheme=stack.scheme.label,
        depth=len(stack.layers),
        certificate=proven.words,
        segments=proven.segments,
        slack=seen.slack,
        before=look,
        # A converted model's first layer has the entry inside, where the profile does not see what it returns.
        **_law(stack, profile.rms[0] if isinstance(stack, Stack) else _plain(seen.pooled)[0], proven.segments),
    )


def _mixing(found: MixingGain | None) -> dict[str, Any]:
    names = ("mixing_forward", "mixing_backward", "stream_spread")
    return dict(zip(names, _plain((found.forward, found.backward, found.spread)), strict=True)) if found else {}


def _law(stack: SchemeStack, entry: Number, segments: Sequence[Segment]) -> dict[str, Any]:
    """The prediction of the scheme's law, for an entry of this RMS."""
    bound = stack.bound
    try:
        law = bound.law()
    except NormLabError as error:
        return {"notes": (str(error),)}
    growth, sizes = law.forward, _sizes(bound, law)
    growth += "" if growth == "bounded" else " at worst, with weights of one size in all blocks"
    start = f"at initialisation RMS × {sizes[-1]:.3g} over {bound.depth} blocks" if sizes else ""
    start += ", if branches return the RMS they are given" if sizes else ""
    return {
        "growth": law.forward,
        "forward": "; ".join(part for part in (growth, start, law.note) if part),
        "backward": law.backward + (_READS_STATE if _scores_grow(stack, law) else ""),
        "predicted": _plain(_predicted(stack, sizes, entry, segments)) if sizes and entry is not None else (),
    }


def _sizes(bound: BoundScheme, law: Law) -> list[float]:
    """RMS at initialisation after the entry and every block; empty if the law does not predict it."""
    if law.rms is None:
        return []
    cut = bound.scheme.cut
    whole = [law.rms(round(bound.branches_before(place) / cut)) for place in range(bound.depth + 1)]
    # Blocks are independent: steps of 1/cut, cut times as many, add 1/cut of the variance.
    return [math.sqrt(1.0 + (size**2 - 1.0) / cut) for size in whole]


def _scores_grow(stack: SchemeStack, law: Law) -> bool:
    """Whether attention scores scale with the state: no norm between them."""
    return law.reads_state and not any(need.name == "q-norm" for need in stack.needs)


def _predicted(
    stack: SchemeStack, sizes: Sequence[float], entry: float, segments: Sequence[Segment]
) -> Iterator[float]:
    """The law's sizes, which are for an entry of RMS 1, for one of another: what adds to a state adds to its square,
    and what resets it forgets the entry.
    """
    yield entry
    for segment in segments:
        if segment.kind == "resets" and not keeps_norm(stack):
            entry = stack.scheme.new_norm(stack.dim).core_bound(math.inf)
        for size in sizes[segment.first + 1 : segment.last + 2]:
            adds = segment.kind == "adds"
            yield math.hypot(entry, math.sqrt(max(size**2 - 1.0, 0.0))) if adds else entry * size


def _with_foreign_slopes(found: Theory, foreign: Theory) -> Theory:
    """The theory of a converted model: what its own branches, of which nothing is proven, do by their weights."""
    look, other = found.before, foreign.before
    assert look is not None
    assert other is not None
    look = dataclasses.replace(look, slopes=other.slopes)
    return dataclasses.replace(found, before=look, notes=(*found.notes, *foreign.notes))


def _foreign_theory(target: Target, model: nn.Module, profile: Profile) -> Theory:
    blocks = find_stacks(model, target.blocks)[0].blocks
    scheme = scheme_of(model)
    label = None if scheme is None else scheme.label
    try:
        found = [slopes_by_role(block) for block in blocks]
    except NormLabError as error:
        look, notes = TheoryLook(step=profile.step), (f"no slopes from the weights: {error}",)
        return Theory(scheme=label, depth=len(blocks), before=look, notes=notes)
    names = [name for name in found[0] if all(name in slopes for slopes in found)]
    slopes = _slopes({name: [slopes[name] for slopes in found] for name in names})
    return Theory(scheme=label, depth=len(blocks), before=TheoryLook(step=profile.step, slopes=slopes))


def _with_block_tests(
    found: Theory, model: nn.Module, pattern: str | None, run: Callable[[], Any], profile: Profile, *, first: bool
) -> Theory:
    """Add what follows from running blocks alone; the scale test at the first snapshot only."""
    found = _with_jacobians(found, model, pattern, run, profile)
    return _with_scale_test(found, model, pattern, run) if first else found


def _with_scale_test(found: Theory, model: nn.Module, pattern: str | None, run: Callable[[], Any]) -> Theory:
    stacks = find_stacks(model, pattern)
    rows: list[ScaleRow] = []
    for stack in stacks:
        prefix = f"{stack.name}: " if len(stacks) > 1 else ""
        rows += [dataclasses.replace(row, branch=prefix + row.branch) for row in scale_test(model, stack, run)]
    return dataclasses.replace(found, scale_test=tuple(rows), scale=summary(rows))


def _with_jacobians(
    found: Theory, model: nn.Module, pattern: str | None, run: Callable[[], Any], profile: Profile
) -> Theory:
    """Add Jacobians of the stack with most blocks, which the profile is of."""
    try:
        rows = jacobian_rows(model, find_stacks(model, pattern)[0], run)
    except RuntimeError as error:
        # A kernel of the user's own without a second derivative.
        reason = str(error).splitlines()[0]
        return dataclasses.replace(found, notes=(*found.notes, f"no Jacobians of the branches: {reason}"))
    look = found.before or TheoryLook(step=profile.step)
    measured, bound = _log_gains(rows, profile)
    look = dataclasses.replace(look, jacobians=tuple(rows), log_gain=measured, log_gain_bound=bound)
    return dataclasses.replace(found, before=look)


def _log_gains(rows: Sequence[JacobianRow], profile: Profile) -> tuple[Number, Number]:
    """(Σ log χ, Σ log(1 + ‖J‖)) over the blocks of the rows."""
    places, norms = sorted({row.block for row in rows}), [row.norm for row in rows]
    # A module that stands in the list twice has more blocks than it is run with, or fewer.
    gains = [profile.gain[place] if place < profile.depth else None for place in places]
    if not rows or not all(gains) or any(norm is None for norm in norms):
        return None, None
    return sum(math.log(x) for x in gains if x), sum(math.log1p(x) for x in norms if x is not None)


def _jacobian_words(found: Theory) -> str:
    return "; ".join(words for look in found.looks if (words := _one_look(look, found.depth)))


def _one_look(look: TheoryLook, depth: int) -> str:
    known = [row for row in look.jacobians if row.norm is not None]
    if not known:
        return ""
    largest, count = max(known, key=lambda row: row.norm or 0.0), len({row.block for row in known})
    where = f"{named([largest.block], depth + 1)}, {largest.branch}"
    words = f"largest ‖J‖ {largest.norm:.3g} ({where}) at step {look.step}"
    if look.log_gain is None or look.log_gain_bound is None:
        return words
    shown = f"Σ log χ = {look.log_gain:z.2f} of at most Σ log(1 + ‖J‖) = {look.log_gain_bound:.2f}"
    return f"{shown} over {count} of {depth} blocks, {words}"


def _slopes(found: Mapping[str, Sequence[float]]) -> tuple[GradientSlope, ...]:
    return tuple(
        GradientSlope(branch=name, values=_plain(values), trend=_trend(values)) for name, values in found.items()
    )


def _trend(values: Sequence[float]) -> Trend | None:
    if len(values) < 3 or not all(math.isfinite(value) and value > 0.0 for value in values):
        return None
    fit = power_law(range(1, len(values) + 1), values)
    return Trend(exponent=fit.exponent, low=fit.low, high=fit.high)


def _slope_words(found: Theory) -> str:
    """One clause for each branch: how its slope depends on depth, and how training changed it."""
    latest = found.after or found.before
    first = {slope.branch: slope for slope in found.before.slopes} if found.before else {}
    return "; ".join(_one_slope(slope, first.get(slope.branch)) for slope in latest.slopes) if latest else ""


def _one_slope(slope: GradientSlope, first: GradientSlope | None) -> str:
    middle = _mean(slope.values)
    words = f"{slope.branch}: Λ {middle:.3g} on average" if middle is not None else f"{slope.branch}: no Λ"
    if slope.trend is not None:
        span = "" if slope.trend.low is None else f" [{slope.trend.low:z.2f}, {slope.trend.high:z.2f}]"
        rises = "grows" if slope.trend.grows else "does not grow"
        words += f", {rises} with depth (exponent {slope.trend.exponent:z.2f}{span})"
    start = _mean(first.values) if first and first is not slope else None
    return f"{words}, {middle / start:.2f} times its start after training" if start and middle else words


def _mean(values: Numbers) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _plain(values: Iterable[float]) -> Numbers:
    return tuple(value if math.isfinite(value) else None for value in values)


def _shares(sizes: Sequence[float], bounds: Sequence[float]) -> Numbers:
    """size / bound at every boundary; None without a bound."""
    # A bound of zero is one, too: any state above it uses far more than all of it.
    pairs = zip(sizes, bounds, strict=True)
    return _plain(size / max(bound, _NOTHING) if math.isfinite(bound) else math.nan for size, bound in pairs)
