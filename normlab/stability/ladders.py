"""Ladders: the same burst at several depths, widths or residual steps, as far as the time allows.

Rungs are run from the smallest to the largest. Before each one its time is told from that of the rungs before it; what
would not fit is left out, and a note says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from normlab.errors import NormLabError
from normlab.stability.burst import Burst, Inspect, burst
from normlab.stability.config import CheckConfig
from normlab.stability.isolation import fresh_model
from normlab.stability.laws import gradient_gain
from normlab.stability.profile import Ladder, Number, Profile
from normlab.stability.rungs import Look, Step, Width
from normlab.stability.targets.base import Target
from normlab.stability.verdict import View

Tell = Callable[[str], None]
"""Called with a few words before each piece of work."""

LEAST_DEPTH, DEEP_ENOUGH, MOST_RUNGS = 5, 24, 4
RESIDUAL_STEPS = (0.1, 0.3, 1.0)


class Budget:
    """Time that is left, and what a unit of work costs: what the last one took."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.perf_counter()
        self._price: float | None = None

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self._start)

    def paid(self, work: float, seconds: float) -> None:
        self._price = seconds / work

    def price(self, work: float) -> float:
        """Seconds for some work; none as long as nothing is known."""
        return 0.0 if self._price is None else work * self._price

    def fits(self, work: float) -> bool:
        return self.price(work) <= self.left


@dataclass(frozen=True)
class DepthLadder:
    """The depth ladder of every stack of a design, the stack with most blocks first."""

    ladders: dict[str, Ladder]
    bursts: dict[int, list[Burst]]
    """By depth, then by seed."""
    notes: tuple[str, ...] = ()

    @property
    def curves(self) -> dict[str, tuple[Number, ...]]:
        """The loss at every step of the first seed, by depth."""
        return {str(depth): tuple(runs[0].losses) for depth, runs in self.bursts.items()}


@dataclass
class _Rungs:
    """What the rungs gave so far."""

    bursts: dict[int, list[Burst]] = field(default_factory=dict)
    inspected: bool = False


def default_depths(target: Target) -> tuple[int, ...]:
    """Doublings through the target's own depth, up to at least 24 blocks: growth takes two depths of 12 or more."""
    if "depth" not in target.resizable:
        return (target.depth,)
    top = target.depth
    while top < DEEP_ENOUGH:
        top *= 2
    halves = takewhile(lambda depth: depth >= LEAST_DEPTH, (top >> k for k in range(MOST_RUNGS)))
    return tuple(sorted({*halves, max(target.depth, 2)}))


def depth_ladder(
    target: Target, config: CheckConfig, tell: Tell, *, own_depth: int, inspect: Inspect | None = None
) -> DepthLadder:
    """Bursts over depths and seeds. `inspect` sees the first seed's model of the deepest rung up to `own_depth`."""
    depths = _depths(target, config)
    budget, rungs = Budget(config.max_seconds), _Rungs()
    for place, depth in enumerate(depths):
        following = depths[place + 1 :]
        if rungs.bursts and not budget.fits(depth):
            break
        is_last = not following or following[0] > own_depth or not budget.fits(depth + following[0])
        looks = is_last and depth <= own_depth
        rungs.bursts[depth] = _bursts(target, config, tell, depth, inspect if looks else None, budget)
        rungs.inspected |= looks
    if inspect is not None and not rungs.inspected:
        _inspect_again(target, rungs, own_depth, inspect)
    left_out = [depth for depth in depths if depth not in rungs.bursts]
    return DepthLadder(_by_stack(rungs.bursts), rungs.bursts, _note_cut("depth", left_out, config))


def width_ladder(target: Target, config: CheckConfig, tell: Tell, *, depth: int) -> tuple[list[Width], tuple[str, ...]]:
    """Bursts at one depth over widths, the target's own among them."""
    if "width" not in target.resizable or target.width is None:
        return [], ("no width ladder: the width of this target cannot be changed",)
    asked = config.widths or (target.width // 2, target.width, 2 * target.width)
    widths = sorted({width for width in asked if width > 0})
    budget, rungs = Budget(config.max_seconds), []
    for width in widths:
        if rungs and not budget.fits(width):
            break
        tell(f"width {width}")
        found = [burst(target, depth=depth, width=width, **options) for options in _seeds(config)]
        budget.paid(width, sum(run.seconds for run in found))
        rungs.append(Width(width=width, ladder=_main(found)))
    return rungs, _note_cut("width", widths[len(rungs) :], config)


def step_ladder(target: Target, config: CheckConfig, tell: Tell, *, depth: int) -> tuple[list[Step], tuple[str, ...]]:
    """Bursts at one depth over residual steps Δt."""
    variants = {size: variant for size in RESIDUAL_STEPS if (variant := target.with_step(size)) is not None}
    if not variants:
        return [], ("no residual-step ladder: this design has no residual step to change",)
    budget, rungs = Budget(config.max_seconds), []
    for size, variant in variants.items():
        if rungs and not budget.fits(1.0):
            break
        tell(f"residual step {size:g}")
        found = [burst(variant, depth=depth, **options) for options in _seeds(config)]
        budget.paid(1.0, sum(run.seconds for run in found))
        rungs.append(_step(size, depth, _main(found)))
    return rungs, _note_cut("residual step", list(variants)[len(rungs) :], config)


def _depths(target: Target, config: CheckConfig) -> list[int]:
    if config.depths is None:
        return list(default_depths(target))
    if "depth" not in target.resizable and set(config.depths) != {target.depth}:
        raise NormLabError(
            f"the depth of {target.name} cannot be changed: it has {target.depth} blocks; leave depths out, or give a "
            "function of depth and width"
        )
    return sorted(config.depths)


def _bursts(
    target: Target, config: CheckConfig, tell: Tell, depth: int, inspect: Inspect | None, budget: Budget
) -> list[Burst]:
    runs = []
    # A depth that cannot be changed is not asked for: the module is what it is.
    asked = depth if "depth" in target.resizable else None
    for options in _seeds(config):
        seed = options["seed"]
        tell(f"{depth} blocks" + (f", seed {seed}" if config.seeds > 1 else ""))
        runs.append(burst(target, depth=asked, inspect=inspect if seed == 0 else None, **options))
    budget.paid(depth, sum(run.seconds for run in runs))
    return runs


def _seeds(config: CheckConfig) -> list[dict[str, Any]]:
    """What bursts are run with, one for each seed."""
    return [{"seed": seed, "steps": config.steps, "lr": config.lr} for seed in range(config.seeds)]


def _inspect_again(target: Target, rungs: _Rungs, own_depth: int, inspect: Inspect) -> None:
    """Where a rung turned out to be the last one only after it had run: a fresh model, as it was at step 0."""
    depth = max((depth for depth in rungs.bursts if depth <= own_depth), default=min(rungs.bursts))
    with fresh_model(target, depth=depth if "depth" in target.resizable else None) as model:
        inspect(model, _first(rungs.bursts[depth][0].before))


def _by_stack(bursts: dict[int, list[Burst]]) -> dict[str, Ladder]:
    profiles: dict[str, list[Profile]] = {}
    for run in (run for runs in bursts.values() for run in runs):
        for look in (run.before, run.after):
            for name, profile in look.items():
                profiles.setdefault(name, []).append(profile)
    return {name: Ladder(tuple(found)) for name, found in profiles.items()}


def _main(runs: Iterable[Burst]) -> Ladder:
    """Both looks of all seeds at the stack with most blocks."""
    return Ladder(tuple(_first(look) for run in runs for look in (run.before, run.after) if look))


def _first(look: dict[str, Profile]) -> Profile:
    return next(iter(look.values()))


def _step(size: float, depth: int, ladder: Ladder) -> Step:
    looks = {when: _look(ladder.at(ladder.depths[-1], when)) for when in ladder.snapshots}
    return Step(step=size, depth=depth, before=looks["before"], after=looks.get("after", Look()))


def _look(profiles: Sequence[Profile]) -> Look:
    view, gain = View(profiles), gradient_gain(profiles)
    return Look(
        rms=view.number(lambda profile: profile.rms[-1]),
        G=gain if gain is not None and math.isfinite(gain) else None,
        loss=view.number(lambda profile: profile.loss),
    )


def _note_cut(what: str, left_out: Iterable[float], config: CheckConfig) -> tuple[str, ...]:
    named = ", ".join(f"{rung:g}" for rung in left_out)
    if not named:
        return ()
    return (f"{what} {named} left out to stay within {config.max_seconds:g} s; raise --max-seconds for more",)
