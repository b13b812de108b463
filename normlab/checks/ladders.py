"""Run ladders: the same burst at several depths, widths or residual steps, within a time budget.

The smallest rung comes first and measures the cost of a unit of work; then the design's own size and the largest ones,
as far as the budget allows. A fit needs a wide range, so the rungs in between are left out first; a note says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from normlab.checks.burst import Burst, Inspect, burst
from normlab.checks.config import CheckConfig
from normlab.checks.isolation import fresh_model
from normlab.checks.judge.growth_laws import LEAST_STEP, classify, gradient_gain
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Snapshot
from normlab.checks.ladder_records import Ladder, Look, StepRung, WidthRung
from normlab.errors import NormLabError
from normlab.probes.profile import Number, Profile
from normlab.targets.target import Target

T = TypeVar("T")
Tell = Callable[[str], None]
"""Called with a few words before each piece of work."""

LEAST_DEPTH, DEEP_ENOUGH, MOST_RUNGS = 5, 24, 4
ENOUGH_SEEDS = 3
"""Seeds needed for a useful interval: Student's factor is 12.7 for two seeds, 4.3 for three."""
RESIDUAL_STEPS = (0.1, 0.3, 1.0)


class Budget:
    """Time budget: remaining time, and the latest measured cost of a unit of work."""

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
        """Estimated seconds for some work; 0 before anything was measured."""
        return 0.0 if self._price is None else work * self._price

    def fits(self, work: float) -> bool:
        return self.price(work) <= self.left

    def affordable(self, rungs: Iterable[T], work: Callable[[T], float]) -> Iterator[T]:
        """Yield rungs in the given order while they fit; one that does not is tried again after each new cost."""
        waiting = list(rungs)
        while (rung := next((rung for rung in waiting if self.fits(work(rung))), None)) is not None:
            waiting.remove(rung)
            yield rung


@dataclass(frozen=True)
class DepthLadder:
    """The depth ladder of every stack of a design, the stack with most blocks first."""

    ladders: dict[str, Ladder]
    bursts: dict[int, list[Burst]]
    """Bursts by depth, then by seed."""
    notes: tuple[str, ...] = ()

    @property
    def curves(self) -> dict[str, tuple[Number, ...]]:
        """Loss at every step of the first seed, by depth."""
        return {str(depth): tuple(runs[0].losses) for depth, runs in self.bursts.items()}


def default_depths(target: Target) -> tuple[int, ...]:
    """Doublings through the target's own depth, to 24 blocks at least: growth is judged on two depths of 12 or more."""
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
    """Train bursts over depths and seeds. `inspect` gets one model: first seed, deepest rung up to `own_depth`."""
    depths = _depths(target, config)
    # All of them now: a rung that cannot be built would waste the time of those before it.
    for depth in depths:
        target.check_room(depth=depth)
    climb = _Climb(target, config, tell, depths, own_depth, inspect)
    for depth in climb.budget.affordable(by_importance(depths, own_depth), climb.cost):
        climb.take(depth)
    climb.finish()
    bursts = dict(sorted(climb.bursts.items()))
    cut = note_cut("depth", [depth for depth in depths if depth not in bursts], config)
    return DepthLadder(_by_stack(bursts), bursts, (*cut, *climb.notes))


def by_importance(rungs: Iterable[int], own: int) -> list[int]:
    """The smallest rung, which measures the cost; the design's own, or the next below; then from the largest down."""
    ordered = sorted(set(rungs))
    nearest = [rung for rung in ordered if rung <= own][-1:]
    return list(dict.fromkeys([*ordered[:1], *nearest, *reversed(ordered)]))


def width_ladder(
    target: Target, config: CheckConfig, tell: Tell, *, depth: int
) -> tuple[list[WidthRung], tuple[str, ...]]:
    """Train bursts over widths at one depth, including the target's own width."""
    if "width" not in target.resizable or target.width is None:
        return [], ("no width ladder: the width of this target cannot be changed",)
    asked = config.widths or (target.width // 2, target.width, 2 * target.width)
    widths = sorted({width for width in asked if width > 0})
    for width in widths:
        target.check_room(depth=depth, width=width)
    budget, rungs = Budget(config.max_seconds), {}
    for width in budget.affordable(by_importance(widths, target.width), float):
        tell(f"width {width}")
        found = [burst(target, depth=depth, width=width, **options) for options in _seeds(config)]
        budget.paid(width, sum(run.seconds for run in found))
        rungs[width] = WidthRung(width=width, ladder=_main(found))
    cut = note_cut("width", [width for width in widths if width not in rungs], config)
    return [rungs[width] for width in sorted(rungs)], cut


def step_ladder(
    target: Target, config: CheckConfig, tell: Tell, *, depth: int
) -> tuple[list[StepRung], tuple[str, ...]]:
    """Train bursts over residual steps Δt at one depth."""
    variants = {size: variant for size in RESIDUAL_STEPS if (variant := target.with_step(size)) is not None}
    if not variants:
        return [], ("no residual-step ladder: this design has no residual step to change",)
    budget, rungs = Budget(config.max_seconds), {}
    # Both ends first, as for depths.
    ends_first = sorted(variants, key=lambda size: size not in (min(variants), max(variants)))
    for size in budget.affordable(ends_first, lambda _size: 1.0):
        tell(f"residual step {size:g}")
        found = [burst(variants[size], depth=depth, **options) for options in _seeds(config)]
        budget.paid(1.0, sum(run.seconds for run in found))
        rungs[size] = _step(size, depth, _main(found))
    cut = note_cut("residual step", [size for size in variants if size not in rungs], config)
    return [rungs[size] for size in sorted(rungs)], cut


@dataclass
class _Climb:
    """A depth ladder in progress."""

    target: Target
    config: CheckConfig
    tell: Tell
    depths: Sequence[int]
    own_depth: int
    inspect: Inspect | None
    budget: Budget = field(init=False)
    bursts: dict[int, list[Burst]] = field(default_factory=dict)
    inspected: int = 0
    """Depth of the deepest inspected rung."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.budget = Budget(self.config.max_seconds)

    def cost(self, depth: int) -> int:
        """Cost of a rung in blocks: growth takes two depths, so the first rung includes a second one."""
        seconds = [other for other in self.depths if Thresholds.least_depth <= other and other * LEAST_STEP <= depth]
        return depth + (min(seconds) if seconds and not self.bursts.keys() & set(seconds) else 0)

    def take(self, depth: int) -> None:
        """Run all seeds of a depth; inspect the model unless a deeper rung up to the own depth will be."""
        deeper = [other for other in self.depths if depth < other <= self.own_depth and other not in self.bursts]
        deeper = [other for other in deeper if self.budget.fits(depth + self.cost(other))]
        looks = self.inspected < depth <= self.own_depth and not deeper
        self.bursts[depth] = [self._burst(depth, options, looks) for options in _seeds(self.config)]
        self.inspected = depth if looks else self.inspected
        self.budget.paid(depth, sum(run.seconds for run in self.bursts[depth]))

    def finish(self) -> None:
        """After the last rung: more seeds for a close call, and the model inspected if none was."""
        self._add_seeds()
        wanted = max((depth for depth in self.bursts if depth <= self.own_depth), default=min(self.bursts))
        if self.inspect is not None and self.inspected < wanted:
            # It turned out to be the last one only after it had run: a fresh model, as it was at step 0.
            with fresh_model(self.target, depth=self._asked(wanted)) as model:
                self.inspect(model, _first(self.bursts[wanted][0].before))

    def _add_seeds(self) -> None:
        """Add seeds at the two depths that decide the exponent, if its class is doubtful with one seed."""
        law = classify(next(iter(_by_stack(self.bursts).values())))
        more = [options | {"seed": seed} for seed in range(1, ENOUGH_SEEDS) for options in _seeds(self.config)]
        if not law.doubtful or self.config.seeds > 1 or not self.budget.fits(len(more) * sum(law.depths)):
            return
        for depth in law.depths:
            self.bursts[depth] += [self._burst(depth, options, False) for options in more]
        shown = " and ".join(map(str, law.depths))
        self.notes += (f"{ENOUGH_SEEDS} seeds at {shown} blocks, where one spoke for more growth than is sure",)

    def _burst(self, depth: int, options: dict[str, Any], looks: bool) -> Burst:
        seed = options["seed"]
        self.tell(f"{depth} blocks" + (f", seed {seed}" if seed or self.config.seeds > 1 else ""))
        inspect = self.inspect if looks and seed == 0 else None
        return burst(self.target, depth=self._asked(depth), inspect=inspect, **options)

    def _asked(self, depth: int) -> int | None:
        # A depth that cannot be changed is not asked for: the module is what it is.
        return depth if "depth" in self.target.resizable else None


def _depths(target: Target, config: CheckConfig) -> list[int]:
    if config.depths is None:
        return list(default_depths(target))
    if "depth" not in target.resizable and set(config.depths) != {target.depth}:
        raise NormLabError(
            f"the depth of {target.name} cannot be changed: it has {target.depth} blocks; leave depths out, or give a "
            "function of depth and width"
        )
    return sorted(config.depths)


def _seeds(config: CheckConfig) -> list[dict[str, Any]]:
    """The options of a burst, one for each seed."""
    return [{"seed": seed, "steps": config.burst_steps, "lr": config.lr} for seed in range(config.seeds)]


def _by_stack(bursts: dict[int, list[Burst]]) -> dict[str, Ladder]:
    profiles: dict[str, list[Profile]] = {}
    for run in (run for runs in bursts.values() for run in runs):
        for look in (run.before, run.after):
            for name, profile in look.items():
                profiles.setdefault(name, []).append(profile)
    return {name: Ladder(tuple(found)) for name, found in profiles.items()}


def _main(runs: Iterable[Burst]) -> Ladder:
    """Both profiles of all seeds, of the stack with most blocks."""
    return Ladder(tuple(_first(look) for run in runs for look in (run.before, run.after) if look))


def _first(look: dict[str, Profile]) -> Profile:
    return next(iter(look.values()))


def _step(size: float, depth: int, ladder: Ladder) -> StepRung:
    looks = {when: _look(ladder.at(ladder.depths[-1], when)) for when in ladder.snapshots}
    return StepRung(step=size, depth=depth, before=looks["before"], after=looks.get("after", Look()))


def _look(profiles: Sequence[Profile]) -> Look:
    view, gain = Snapshot(profiles), gradient_gain(profiles)
    return Look(
        rms=view.number(lambda profile: profile.rms[-1]),
        G=gain if gain is not None and math.isfinite(gain) else None,
        loss=view.number(lambda profile: profile.loss),
    )


def note_cut(what: str, left_out: Iterable[float], config: CheckConfig) -> tuple[str, ...]:
    named = ", ".join(f"{rung:g}" for rung in left_out)
    if not named:
        return ()
    return (f"{what} {named} left out to stay within {config.max_seconds:g} s; raise --max-seconds for more",)
