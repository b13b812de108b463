"""`check_coordinates`: train a design at several widths and depths, and fit how its activations depend on them.

NormLab's own models are built, initialised and optimised as `normlab train` does it, with the transfer rules of
`--base-dim` and `--base-depth` where they are asked for. Others are built by their target and trained with AdamW.

    result = check_coordinates("pre", base_dim=64, base_depth=4)
    result.axis("width").trends, result.failed, result.table(), result.save("page.html")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normlab.checks.burst import BETAS, adamw, auto_lr
from normlab.checks.check import Checkable, config_of, prepare
from normlab.checks.config import CheckConfig
from normlab.checks.coordinates.exponents import trend
from normlab.checks.coordinates.records import THRESHOLD, Axis, AxisName, CoordinateCheck, Point, Rule
from normlab.checks.coordinates.trace import ModuleTrace, trace
from normlab.checks.isolation import few_threads, quiet_numbers
from normlab.checks.ladders import ENOUGH_SEEDS, Budget, Tell, by_importance, default_depths, note_cut
from normlab.checks.progress import CheckProgress
from normlab.checks.result import Subject
from normlab.errors import NormLabError
from normlab.targets import Target
from normlab.targets.scheme import DesignTarget
from normlab.train.optimiser import build as build_optimiser
from normlab.train.transfer import Transfer
from normlab.utils.records import to_plain
from normlab.utils.seeded import seeded
from normlab.utils.versions import versions

FIRST_DEPTH, RUNGS = 4, 4
"""A scheme has no depth of its own: 4, 8, 16 and 32 blocks, and as many doublings of its width."""

Bases = tuple[int | None, int | None]
"""Width and depth at which the rate counts as tuned."""


def check_coordinates(
    target: Checkable | Target,
    *,
    batch: Any = None,
    loss_fn: Any = None,
    config: CheckConfig | None = None,
    progress: bool = False,
    command: Sequence[str] = (),
    **options: Any,
) -> CoordinateCheck:
    """Coordinate check (muP, CompleteP): does a learning rate carry over to another width or depth?

    Fits how activations, and what training changes in them, depend on width and depth, for every module.

        print(normlab.check_coordinates("pre", base_dim=64, depths=(4, 8, 16)).table())

    Options are the fields of `CheckConfig`: `widths`, `depths`, `base_dim`, `base_depth`, `steps`, `seeds`, `lr`, ...;
    they replace those of `config`. An axis with a single size is left out.
    """
    config = config_of({**options, "coordinates": True}, config)
    found = target if isinstance(target, Target) else prepare(target, config, batch=batch, loss_fn=loss_fn)
    with CheckProgress(found.name, progress=progress) as display:
        return _Session(found, config, display).run(command)


@dataclass(frozen=True)
class _Plan:
    """Plan of one axis: its sizes, and the order in which they are measured."""

    name: AxisName
    sizes: tuple[int, ...]
    own: int
    """The design's own size, measured second if time is short."""
    fixed: int | None


class _Session:
    """A coordinate check in progress."""

    def __init__(self, target: Target, config: CheckConfig, tell: Tell):
        self.target, self.config, self.tell = target, config, tell
        self.bases = _bases(target, config)
        self.seeds = max(config.seeds, ENOUGH_SEEDS)
        self.notes: list[str] = []
        self.start = time.perf_counter()

    def run(self, command: Sequence[str]) -> CoordinateCheck:
        plans = self._plans()
        self.lr = self._rate()
        axes = [axis for plan in plans if (axis := self._axis(plan)) is not None]
        if not axes:
            raise NormLabError("no two sizes could be measured within the time; raise --max-seconds")
        return CoordinateCheck(
            target=self._subject(),
            config=to_plain(self.config),
            base_dim=self.bases[0],
            base_depth=self.bases[1],
            steps=self.config.burst_steps,
            lr=self.lr,
            seeds=self.seeds,
            axes=tuple(axes),
            notes=tuple(self.notes),
            seconds=time.perf_counter() - self.start,
            versions=versions(),
            command=tuple(command),
        )

    def _plans(self) -> list[_Plan]:
        """Plans of the axes with two sizes or more; raises if a model does not fit into memory."""
        widths, depths = _widths(self.target, self.config, self.bases[0]), _depths(self.target, self.config, self.bases)
        plans = [
            _Plan("width", widths, widths[0] if widths else 0, depths[0]),
            _Plan("depth", depths, depths[0], self._fixed_width()),
        ]
        kept = [plan for plan in plans if len(plan.sizes) > 1]
        if not kept:
            raise NormLabError(
                f"{self.target.name} has one width and one depth here; expected two of either, e.g. --widths 64,128,256"
            )
        self.notes += [f"one {plan.name} alone: nothing was fitted over it" for plan in plans if plan not in kept]
        for plan in kept:
            for size in plan.sizes:
                self.target.check_room(**_sizes(plan, size))
        return kept

    def _fixed_width(self) -> int | None:
        if "width" not in self.target.resizable or self.config.width is not None:
            return self.target.width
        return self.bases[0] or self.target.width

    def _rate(self) -> float:
        if self.config.lr != "auto":
            return self.config.lr
        # One rate for all sizes, found at the target's own.
        return auto_lr(self.target)

    def _axis(self, plan: _Plan) -> Axis | None:
        budget, points = Budget(self.config.max_seconds), dict[str, list[Point]]()
        done: list[int] = []
        for size in budget.affordable(by_importance(plan.sizes, plan.own), _work(plan)):
            began = time.perf_counter()
            for seed in range(self.seeds):
                self.tell(f"{plan.name} {size}, seed {seed}")
                for name, found in self._trace(plan, size, seed).items():
                    points.setdefault(name, []).append(_point(size, seed, found))
            budget.paid(_work(plan)(size), time.perf_counter() - began)
            done.append(size)
        self.notes += note_cut(plan.name, [size for size in plan.sizes if size not in done], self.config)
        return self._fitted(plan, sorted(done), points) if len(done) > 1 else None

    def _trace(self, plan: _Plan, size: int, seed: int) -> dict[str, ModuleTrace]:
        sizes = _sizes(plan, size)
        with seeded(seed), few_threads(sizes.get("width") or self.target.width), quiet_numbers():
            model, optimiser = start(self.target, lr=self.lr, seed=seed, bases=self.bases, **sizes)
            return trace(self.target, model, optimiser, steps=self.config.burst_steps, seed=seed)

    def _fitted(self, plan: _Plan, sizes: Sequence[int], points: dict[str, list[Point]]) -> Axis:
        # Modules that not every size has, such as single experts, have no law.
        everywhere = {name: found for name, found in points.items() if len(found) == len(sizes) * self.seeds}
        in_order = {name: sorted(found, key=lambda p: (p.size, p.seed)) for name, found in everywhere.items()}
        return Axis(
            name=plan.name,
            sizes=tuple(sizes),
            fixed=plan.fixed,
            rule=rule_of(self.target, plan.name, self.bases),
            trends=tuple(trend(name, found, THRESHOLD) for name, found in in_order.items()),
        )

    def _subject(self) -> Subject:
        target = self.target
        label = None if target.scheme is None else target.scheme.label
        return Subject(
            name=target.name, kind=target.kind, depth=target.depth, width=target.width, scheme=label, notes=target.notes
        )


def start(
    target: Target, *, lr: float, seed: int, bases: Bases = (None, None), **sizes: int | None
) -> tuple[nn.Module, Optimizer]:
    """A model before its first step, in training mode, and its optimiser; with bases, by the transfer rules."""
    if not isinstance(target, DesignTarget):
        model = target.build(seed=seed, **sizes).train()
        return model, adamw(target, model, lr)
    design = target.sized(sizes.get("depth") or target.depth, sizes.get("width"))
    transfer = Transfer.to(design, *bases)
    with seeded(seed):
        # Made on the CPU, so that a seed means the same weights on every device.
        made = (design if transfer is None else transfer.design(design)).build(device="cpu")
    model = (made if transfer is None else transfer.init_(made)).to(target.device).train()
    return model, build_optimiser(model, lr=lr, betas=BETAS, transfer=transfer)


def rule_of(target: Target, axis: AxisName, bases: Bases) -> Rule:
    """What the transfer rules claim about an axis."""
    if axis == "width":
        return "none" if bases[0] is None else "derived"
    if bases[1] is None or target.scheme is None:
        return "none"
    return target.scheme.depth_transfer


def _bases(target: Target, config: CheckConfig) -> Bases:
    """Base width and depth: those of the options, else those of a run."""
    asked = (config.base_dim, config.base_depth)
    if isinstance(target, DesignTarget):
        return (asked[0] or target.bases[0], asked[1] or target.bases[1])
    if any(asked):
        raise NormLabError(
            f"base_dim and base_depth are for schemes and runs, not for a {target.kind} target; apply the rules in "
            "the model and leave them out"
        )
    return (None, None)


def _widths(target: Target, config: CheckConfig, base: int | None) -> tuple[int, ...]:
    if "width" not in target.resizable or target.width is None:
        if len(config.widths) > 1:
            raise NormLabError(f"the width of {target.name} cannot be changed; leave widths out")
        return ()
    if config.widths:
        return tuple(sorted(config.widths))
    if target.kind == "scheme":
        return _doublings(base or target.width)
    return tuple(sorted({max(target.width // 2, 1), target.width, 2 * target.width}))


def _depths(target: Target, config: CheckConfig, bases: Bases) -> tuple[int, ...]:
    if config.depths is not None:
        if "depth" not in target.resizable and set(config.depths) != {target.depth}:
            raise NormLabError(f"the depth of {target.name} cannot be changed: it has {target.depth} blocks")
        return tuple(sorted(config.depths))
    if "depth" in target.resizable and (bases[1] is not None or target.kind == "scheme"):
        return _doublings(bases[1] or FIRST_DEPTH)
    return default_depths(target)


def _doublings(first: int) -> tuple[int, ...]:
    return tuple(first << k for k in range(RUNGS))


def _sizes(plan: _Plan, size: int) -> dict[str, int | None]:
    return {"width": size, "depth": plan.fixed} if plan.name == "width" else {"depth": size, "width": plan.fixed}


def _work(plan: _Plan) -> Callable[[int], float]:
    return (lambda size: float(size) ** 2) if plan.name == "width" else float


def _point(size: int, seed: int, found: ModuleTrace) -> Point:
    return Point(size=size, seed=seed, sizes=found.sizes, changes=found.changes)
