"""Verdicts on growth over depth: exploding or vanishing hidden states (forward) and gradients (backward)."""

from __future__ import annotations

import math

from normlab.checks.judge import growth_laws
from normlab.checks.judge.blame import blame, to_blame
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Level, Snapshot, Verdict, plain, unmeasured
from normlab.checks.ladder_records import Ladder
from normlab.probes.profile import Number, Profile

GRADIENT_RATIO = "gradient of the first block over the last's"
"""G in tables and formulas, in words."""


def forward(ladder: Ladder, limits: Thresholds) -> Verdict:
    """Verdict on the growth of the state's RMS with depth."""
    law = growth_laws.classify(ladder, limits)
    if law.broken is not None:
        return _broken(law, law.broken)
    if law.p is None:
        words = f"growth not judged: it takes two depths of at least {limits.least_depth} blocks"
        return Verdict(name="forward", finding=law.name, level="ok", words=words)
    view = Snapshot(ladder.deepest(law.when))
    bad = law.name in ("exploding", "super-linear")
    layers = to_blame([_log(x) for x in view.mean(lambda profile: profile.growth)]) if bad else ()
    words = f"{law.name}: {_exponent(law, limits)}{_slope(law, limits)} at step {law.step}"
    return Verdict(
        name="forward",
        finding=law.name,
        level=growth_level(law.name),
        value=law.p.exponent,
        threshold=limits.p_linear,
        layers=layers,
        depth=view.depth,
        words=words + blame(layers, view.depth),
    )


def growth_level(name: growth_laws.Forward) -> Level:
    """Level (ok, warn, fail) of a class of forward growth."""
    return "fail" if name == "exploding" else "warn" if name in ("super-linear", "shrinking") else "ok"


def backward(ladder: Ladder, limits: Thresholds, target: int | None = None) -> Verdict:
    """Verdict on the ratio of the first block's gradient to the last's, at the target depth."""
    law = growth_laws.classify_backward(ladder, target, limits)
    if _is_cut_off(ladder):
        words = "vanishing: the gradient behind the last block was measured and is exactly zero, so no block is trained"
        return Verdict(name="backward", finding="vanishing", level="fail", value=0.0, words=words)
    if law.value is None:
        words = "gradient not judged: none was measured, or one depth alone and not the target"
        return Verdict(name="backward", finding=law.name, level="ok", words=words)
    # The blocks to blame are counted in the stack whose gradient was measured, as the number is.
    view = Snapshot(ladder.at(law.target, law.when) if law.measured else ladder.deepest(law.when))
    bad = law.name != "power law"
    layers = _gradient_to_blame(view, law.name) if bad else ()
    how = "measured" if law.measured else "extrapolated"
    size = f"{GRADIENT_RATIO} {law.value:.3g}" if math.isfinite(law.value) else "a gradient is not finite"
    power = f", ∝ L^{law.fit.exponent:.2f}{_interval(law.fit)}" if law.fit else ", one depth: no exponent"
    bounds = f"{limits.gradient_low:g} to {limits.gradient_high:g}"
    words = f"{law.name}: {size} at {law.target} blocks ({how}, {bounds} is fine){power} at step {law.step}"
    return Verdict(
        name="backward",
        finding=law.name,
        level="fail" if bad else "ok",
        value=plain(law.value),
        threshold=limits.gradient_low if law.value < 1.0 else limits.gradient_high,
        layers=layers,
        depth=view.depth,
        words=words + blame(layers, view.depth),
    )


def unsteady(ladder: Ladder, limits: Thresholds) -> Verdict:
    """Verdict on how much that ratio changed during training."""
    factor = growth_laws.moved(ladder)
    if factor is None:
        return unmeasured("unsteady", "it takes a measurement before training and one after it")
    over = factor > limits.gradient_moved
    words = f"{GRADIENT_RATIO} changed {factor:.3g}-fold in training ({limits.gradient_moved:g} is the limit)"
    return Verdict(
        name="unsteady",
        finding="unsteady" if over else "fine",
        level="fail" if over else "ok",
        value=plain(factor),
        threshold=limits.gradient_moved,
        words=words,
    )


def _broken(law: growth_laws.ForwardLaw, profile: Profile) -> Verdict:
    place = profile.first_broken
    layers = () if place is None else (place - 1,)
    first = f"first in {profile.nan_first}" if profile.nan_first else f"at step {profile.step}"
    words = f"exploding: a value is not finite with {profile.depth} blocks, {first}"
    words += blame(layers, profile.depth)
    p = law.p.exponent if law.p else None
    return Verdict(
        name="forward", finding="exploding", level="fail", value=p, layers=layers, depth=profile.depth, words=words
    )


def _exponent(law: growth_laws.ForwardLaw, limits: Thresholds) -> str:
    """The exponent with its interval, and its range over seeds if they differ, as text."""
    if law.p is None or law.spread is None:
        return ""
    small, large = law.depths
    limit = f"from {small} to {large} blocks ({limits.p_linear:g} is the limit)"
    if law.name == "common part" and law.p_rest is not None:
        together = f"L^{law.p.exponent:.2f} with it"
        return f"RMS ∝ L^{law.p_rest:.2f} {limit} without the part that all tokens have in common, {together}"
    spread = f", seeds {law.spread[0]:.2f} to {law.spread[1]:.2f}" if law.p.n > 1 else ""
    if law.doubtful:
        one = "" if law.p.n > 1 else "; one seed: --seeds 3 tells"
        return f"RMS ∝ L^{law.p.exponent:.2f}{spread}, of which L^{_sure(law.p, limits):.2f} is sure {limit}{one}"
    return f"RMS ∝ L^{law.p.exponent:.2f}{_interval(law.p)}{spread} {limit}"


def _sure(fit: growth_laws.Fit, limits: Thresholds) -> float:
    """The milder end of an exponent's interval."""
    if fit.exponent > 0.0:
        return fit.exponent - limits.p_one_seed if fit.low is None else fit.low
    return fit.exponent + limits.p_one_seed if fit.high is None else fit.high


_HARDLY = 0.05
"""κL below which a stack hardly grows: the ratio of two such slopes would be noise."""


def _slope(law: growth_laws.ForwardLaw, limits: Thresholds) -> str:
    """Text on the other conditions of an explosion, which must all hold."""
    if law.kappa_ratio is None or law.kappa_depth is None:
        return ""
    small, large = law.depths
    grows = law.kappa_depth > _HARDLY and 0.0 < law.kappa_ratio < math.inf
    found: list[tuple[str, Number, Number]] = [("growth rate × depth", law.kappa_depth, limits.kappa_depth)]
    found += [(f"growth rate at {large} over {small} blocks", law.kappa_ratio, law.kappa_ratio_limit)] if grows else []
    # Worth a word where nothing else speaks against an explosion.
    bent = grows and law.bend is not None and law.p is not None and law.p.exponent > limits.p_linear
    found += [("upper half over lower half", law.bend, limits.bend)] if bent else []
    told = [(name, value, limit) for name, value, limit in found if value is not None and limit is not None]
    return "".join(
        f", {name} = {value:.2f}" + (f" (limit {limit:.2f})" if law.name == "exploding" or value <= limit else "")
        for name, value, limit in told
    )


def _interval(fit: growth_laws.Fit) -> str:
    return "" if fit.low is None or fit.high is None else f" [{fit.low:.2f}, {fit.high:.2f}]"


def _is_cut_off(ladder: Ladder) -> bool:
    """Whether no gradient reaches the deepest stack at the last snapshot, as below a head of zeros."""
    last = ladder.deepest(ladder.snapshots[-1])
    return any(profile.grad_h[-1] == 0.0 and not profile.gradient_broken for profile in last)


def _gradient_to_blame(view: Snapshot, name: str) -> tuple[int, ...]:
    broken = view.mean(lambda profile: profile.grad_broken)
    unfit = {place for profile in view.profiles for place in profile.unfit.get("grad_h", [])}
    marked = unfit | {place for place, share in enumerate(broken) if share}
    if marked:
        # The gradient travels down: the highest broken boundary lies right below the block that broke it.
        return (max(marked),) if max(marked) < view.depth else ()
    # G leaves out the first block, and so does the blame for it.
    gains = [None, *(_log(gain) for gain in view.mean(lambda profile: profile.gain)[1:])]
    return to_blame(gains, sign=1.0 if name == "exploding" else -1.0)


def _log(x: Number) -> Number:
    return math.log(x) if x else None
