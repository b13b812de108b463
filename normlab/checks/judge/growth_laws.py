"""Fit growth laws over depth: exponents with confidence intervals, forward growth class, gradient ratio at a depth.

Growth is that of the RMS. One depth cannot tell a power law from an exponential, so the forward class needs two: a
power law l^p has κ ∝ 1/L and a constant p, an exponential e^{κl} has a constant κ and a p that doubles with the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.ladder_records import Ladder
from normlab.numerics.power_law import Fit, half_width, line, power_law
from normlab.probes.profile import Number, Profile, When

Forward = Literal[
    "not judged", "bounded", "shrinking", "random walk", "linear", "common part", "super-linear", "exploding"
]
"""How the RMS of the last state depends on depth; the further right, the worse.

Common part: faster than linear after training, but by what all tokens have in common, and not by what tells them apart.
While a model learns how often each token occurs all its states get one such part; deep stacks are in that phase for
longer, so two depths look like growth that is gone some steps later.
"""

Backward = Literal["not judged", "power law", "vanishing", "exploding"]

FORWARD_ORDER: tuple[Forward, ...] = get_args(Forward)

_FAST: tuple[Forward, ...] = ("super-linear", "exploding")
_MILDER: dict[Forward, Forward] = {"super-linear": "linear", "shrinking": "bounded"}
"""The milder class, reported if the interval of p includes it. An explosion has three more conditions than p."""

LEAST_STEP = 1.5
"""Smallest ratio of two depths to which an exponent is fitted."""


@dataclass(frozen=True, kw_only=True)
class ForwardLaw:
    """The class of forward growth at one snapshot, with the numbers it follows from."""

    name: Forward
    when: When
    step: int
    depths: tuple[int, ...] = ()
    """The two depths that were judged."""
    p: Fit | None = None
    """Slope of log RMS on log depth between the two, mean over seeds."""
    spread: tuple[float, float] | None = None
    """Smallest and largest p of a seed."""
    kappa_ratio: float | None = None
    """κ at the larger depth over κ at the smaller one."""
    kappa_ratio_limit: float | None = None
    """Threshold of that ratio, adjusted if the larger depth is not twice the smaller one."""
    kappa_depth: float | None = None
    """κL at the larger depth."""
    bend: float | None = None
    """κ of the upper half of the larger stack over that of its lower half."""
    p_rest: float | None = None
    """The same exponent p for the state minus the mean of all tokens."""
    doubtful: bool = False
    """The point estimate of p is in a worse class, but its interval includes the milder one, which is reported."""
    broken: Profile | None = None
    """The shallowest profile with a value that is not finite."""


@dataclass(frozen=True, kw_only=True)
class BackwardLaw:
    """The gradient ratio G (first block over last) at the target depth, at one snapshot."""

    name: Backward
    when: When
    step: int
    target: int
    """The judged depth: the requested one, or the largest measured if the gradient had vanished there already."""
    value: float | None = None
    """G at the target depth; infinite if a gradient was not finite."""
    measured: bool = True
    """Whether the target depth was measured; otherwise the value is extrapolated by the fit."""
    fit: Fit | None = None
    """Power law of G over depths; None with one depth."""


def kappa(profile: Profile) -> float | None:
    """Slope of log RMS on l over the layers 0.1 L to 0.9 L; None if fewer than two of them have a finite RMS."""
    return _slope_between(profile, 0.1, 0.9)


def bend(profile: Profile) -> float | None:
    """κ of the upper half over that of the lower: 1 for an exponential, whose log is straight, 0.39 for a power law.

    0.55 to 0.6 for a random walk whose increments become more and more aligned with depth.
    """
    lower, upper = _slope_between(profile, 0.1, 0.5), _slope_between(profile, 0.5, 0.9)
    return _kappa_ratio(lower, upper)


def p_depth(ladder: Ladder, when: When, pair: tuple[int, int] | None = None) -> Fit | None:
    """Slope of log RMS(h_L) on log L over the last doubling, mean over seeds with their interval."""
    pair = pair or last_pair(ladder, when)
    slopes = _slopes(ladder, when, pair, _last_rms) if pair else []
    if not pair or not slopes:
        return None
    mean = float(np.mean(slopes))
    sizes = [size for profile in ladder.at(pair[1], when) if (size := profile.rms[-1])]
    intercept = float(np.mean(np.log(sizes))) - mean * math.log(pair[1])
    half = half_width(slopes, 0.95)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return Fit(exponent=mean, intercept=intercept, low=low, high=high, n=len(slopes))


def last_pair(ladder: Ladder, when: When, least: int = 1) -> tuple[int, int] | None:
    """The largest depth of a snapshot and the next one that is clearly smaller, both at least `least`."""
    depths = [depth for depth in ladder.depths if depth >= least and ladder.at(depth, when)]
    smaller = [depth for depth in depths if depth * LEAST_STEP <= depths[-1]]
    return (smaller[-1], depths[-1]) if smaller else None


def classify(ladder: Ladder, thresholds: Thresholds | None = None) -> ForwardLaw:
    """The class of the forward pass: the worse of the two snapshots."""
    laws = [forward_law(ladder, when, thresholds) for when in ladder.snapshots]
    return max(laws, key=_badness)


def forward_law(ladder: Ladder, when: When, thresholds: Thresholds | None = None) -> ForwardLaw:
    """The class of the forward pass at one snapshot, from its two largest depths."""
    limits = thresholds or Thresholds()
    profiles = sorted((p for p in ladder.profiles if p.when == when), key=lambda p: p.depth)
    broken = next((profile for profile in profiles if not_finite(profile)), None)
    pair = last_pair(ladder, when, limits.least_depth)
    p = p_depth(ladder, when, pair) if pair else None
    step = profiles[-1].step
    if pair is None or p is None:
        return ForwardLaw(name="exploding" if broken else "not judged", when=when, step=step, broken=broken)
    slopes, apart = (_slopes(ladder, when, pair, read) for read in (_last_rms, _last_spread))
    small, large = (_mean_kappa(ladder, depth, when) for depth in pair)
    ratio, limit = _kappa_ratio(small, large), _ratio_limit(limits.kappa_ratio, pair)
    extent = None if large is None else large * pair[1]
    bent = _mean_bend(ladder, pair[1], when)
    rest = float(np.mean(apart)) if apart else None
    explodes = _explodes(p.exponent, ratio, limit, extent, bent, limits)
    name: Forward = "exploding" if explodes else _by_exponent(p.exponent, limits)
    if when == "after" and name in _FAST and rest is not None and rest <= limits.p_linear:
        name = "common part"
    doubtful = name in _MILDER and not _is_sure(p, limits)
    return ForwardLaw(
        name="exploding" if broken else _MILDER[name] if doubtful else name,
        when=when,
        step=step,
        depths=pair,
        p=p,
        spread=(min(slopes), max(slopes)),
        kappa_ratio=ratio,
        kappa_ratio_limit=limit,
        kappa_depth=extent,
        bend=bent,
        p_rest=rest,
        doubtful=doubtful,
        broken=broken,
    )


def not_finite(profile: Profile) -> bool:
    """Whether anything in the forward pass was not finite."""
    return profile.first_broken is not None or bool({"loss", "logits_rms", "logsumexp"} & profile.unfit.keys())


def classify_backward(ladder: Ladder, target: int | None = None, thresholds: Thresholds | None = None) -> BackwardLaw:
    """The class of the gradient at the target depth (none: the largest measured): the worse of the two snapshots."""
    laws = [backward_law(ladder, when, target, thresholds) for when in ladder.snapshots]
    return max(laws, key=_distance)


def backward_law(
    ladder: Ladder, when: When, target: int | None = None, thresholds: Thresholds | None = None
) -> BackwardLaw:
    """The gradient's gain at the target depth, measured or extrapolated, and its class."""
    limits, profiles = thresholds or Thresholds(), [p for p in ladder.profiles if p.when == when]
    deepest = max(profile.depth for profile in profiles)
    target = target or deepest
    fit = _fit_gradient(profiles, limits.least_depth)
    # Where a gradient is lost or infinite already at the largest depth measured, no fit makes it better.
    if gradient_gain(ladder.at(deepest, when)) in (0.0, math.inf):
        target = deepest
    measured = bool(ladder.at(target, when))
    value = gradient_gain(ladder.at(target, when)) if measured else fit.at(target) if fit else None
    step = max(profile.step for profile in profiles)
    name = _by_gain(value, limits)
    return BackwardLaw(name=name, when=when, step=step, target=target, value=value, measured=measured, fit=fit)


def gradient_gain(profiles: Sequence[Profile]) -> float | None:
    """G, geometric mean over seeds; infinite if a gradient was not finite, 0 if one was zero."""
    if any(profile.gradient_broken for profile in profiles):
        return math.inf
    gains = [gain for profile in profiles if (gain := profile.G) is not None]
    if not gains:
        return None
    return 0.0 if 0.0 in gains else math.exp(float(np.mean(np.log(gains))))


def moved(ladder: Ladder) -> float | None:
    """The factor, at least 1, by which G of the deepest stack changed during the burst.

    None without both snapshots, or where G was zero or infinite from the start.
    """
    both = [depth for depth in ladder.depths if ladder.at(depth, "before") and ladder.at(depth, "after")]
    if not both:
        return None
    before, after = (gradient_gain(ladder.at(both[-1], when)) for when in ("before", "after"))
    if before is None or after is None or before in (0.0, math.inf):
        return None
    return math.inf if after == 0.0 else max(after / before, before / after)


def _slope_between(profile: Profile, start: float, end: float) -> float | None:
    """Slope of log RMS on l between two shares of the layers."""
    places = range(math.ceil(start * profile.depth), math.floor(end * profile.depth) + 1)
    points = [(place, size) for place in places if (size := profile.rms[place])]
    if len(points) < 2:
        return None
    x, sizes = np.array(points, dtype=float).T
    return line(x, np.log(sizes))[0]


def _last_rms(profile: Profile) -> Number:
    """RMS of the last state."""
    return profile.rms[-1]


def _last_spread(profile: Profile) -> Number:
    """RMS of the last state minus the mean of all tokens."""
    variance = profile.var_data[-1]
    return None if variance is None else math.sqrt(variance)


def _slopes(ladder: Ladder, when: When, pair: tuple[int, int], read: Callable[[Profile], Number]) -> list[float]:
    """p of every seed with a finite RMS at both depths."""
    small, large = ({p.seed: size for p in ladder.at(depth, when) if (size := read(p))} for depth in pair)
    step = math.log(pair[1] / pair[0])
    return [(math.log(large[seed]) - math.log(small[seed])) / step for seed in small if seed in large]


def _mean_kappa(ladder: Ladder, depth: int, when: When) -> float | None:
    slopes = [slope for profile in ladder.at(depth, when) if (slope := kappa(profile)) is not None]
    return float(np.mean(slopes)) if slopes else None


def _mean_bend(ladder: Ladder, depth: int, when: When) -> float | None:
    bends = [found for profile in ladder.at(depth, when) if (found := bend(profile)) is not None]
    return float(np.mean(bends)) if bends else None


def _kappa_ratio(small: float | None, large: float | None) -> float | None:
    if small is None or large is None:
        return None
    # Growth that only the deeper stack has is no power law either.
    return large / small if small > 0.0 else math.inf if large > 0.0 else 0.0


def _ratio_limit(threshold: float, pair: tuple[int, int]) -> float:
    """The threshold is for depths of ratio 2; for a ratio r it keeps its relative place between 1/r and 1."""
    power_law = pair[0] / pair[1]
    return power_law + (2.0 * threshold - 1.0) * (1.0 - power_law)


def _explodes(
    p: float, ratio: float | None, limit: float, extent: float | None, bent: float | None, limits: Thresholds
) -> bool:
    if ratio is None or extent is None or (bent is not None and bent <= limits.bend):
        return False
    return ratio > limit and extent > limits.kappa_depth and p > limits.p_linear


def _by_exponent(p: float, limits: Thresholds) -> Forward:
    if p <= -limits.p_bounded:
        return "shrinking"
    if p < limits.p_bounded:
        return "bounded"
    if p < limits.p_walk:
        return "random walk"
    return "linear" if p <= limits.p_linear else "super-linear"


def _is_sure(p: Fit, limits: Thresholds) -> bool:
    """Whether the interval of an exponent in a worse class excludes the milder one."""
    low = p.exponent - limits.p_one_seed if p.low is None else p.low
    high = p.exponent + limits.p_one_seed if p.high is None else p.high
    return low > limits.p_linear or high <= -limits.p_bounded


def _badness(law: ForwardLaw) -> tuple[int, bool, float]:
    """Sort key, larger is worse: by class, then not finite, then by exponent."""
    return (FORWARD_ORDER.index(law.name), law.broken is not None, law.p.exponent if law.p else -math.inf)


def _fit_gradient(profiles: Sequence[Profile], least: int) -> Fit | None:
    """The power law of G over depths that are deep enough to judge, or over all if fewer than two are."""
    points = [(p.depth, gain) for p in profiles if not p.gradient_broken and (gain := p.G)]
    deep = [point for point in points if point[0] >= least]
    chosen = deep if len({depth for depth, _ in deep}) > 1 else points
    depths, gains = [depth for depth, _ in chosen], [gain for _, gain in chosen]
    return power_law(depths, gains) if len(set(depths)) > 1 else None


def _by_gain(value: float | None, limits: Thresholds) -> Backward:
    if value is None:
        return "not judged"
    if value < limits.gradient_low:
        return "vanishing"
    return "exploding" if value > limits.gradient_high else "power law"


def _distance(law: BackwardLaw) -> tuple[bool, bool, float]:
    """Sort key, larger is worse: judged, then out of bounds, then further from 1."""
    if law.value is None:
        return (False, False, 0.0)
    far = math.inf if law.value == 0.0 or math.isinf(law.value) else abs(math.log(law.value))
    return (True, law.name != "power law", far)
