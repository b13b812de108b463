"""`normlab ladder --dry-run`: what a ladder would cost and could show at best, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normlab.compare.statistics import bonferroni_level
from normlab.ladders.config import TUNE_SEED, LadderConfig
from normlab.ladders.description import embedding_share
from normlab.ladders.places import places, target_places
from normlab.ladders.plan import LadderPlan
from normlab.ladders.rates import FoundRate
from normlab.ladders.run import LadderRun
from normlab.ladders.rung import Rung
from normlab.ladders.statistics import expected_widths
from normlab.ladders.statistics.answer import FEW_STEPS, Design, ExpectedWidth, Place
from normlab.ladders.statistics.identified import obstacles_of_design
from normlab.pages.numbers import ratio
from normlab.train.distributed import Precision
from normlab.train.hardware import describe, matmul_ceiling
from normlab.utils.text import counted, duration, size

_USUAL_SHARE = 0.4
"""Fraction of the measured peak FLOP/s that the runs of a ladder usually reach together."""

_COARSE_RATES, _FINE_RATES = 3, 2
"""Learning rates of the shortest search: three by factors of 2, and two between them if it is refined."""


@dataclass(frozen=True)
class RungCost:
    """One rung before it is trained."""

    rung: Rung
    parameters: int
    embedding_share: float
    tokens_per_parameter: tuple[float, float]
    """At the smallest and the largest budget."""
    steps: tuple[int, int]
    epochs: float
    """Passes over the data at the largest budget."""
    memory: int
    """Bytes of one run."""
    runs: int
    flops: float


@dataclass(frozen=True)
class DryRun:
    """Cost of a ladder, and what its design could show at best."""

    device: str
    ceiling: float
    """Measured FLOP/s of one device."""
    devices: int
    rungs: tuple[RungCost, ...]
    rate_runs: int
    """Runs of the learning-rate searches, at least."""
    rate_flops: float
    widths: tuple[ExpectedWidth, ...]
    level: float
    """Joint level of the intervals over all schemes."""
    obstacles: tuple[str, ...] = ()
    """Why nothing beyond the ladder, or not a target, will be identified, whatever comes out."""

    @property
    def runs(self) -> int:
        return self.rate_runs + sum(rung.runs for rung in self.rungs)

    @property
    def flops(self) -> float:
        return self.rate_flops + sum(rung.flops for rung in self.rungs)

    @property
    def seconds(self) -> float:
        """Expected time with all devices."""
        return self.flops / (_USUAL_SHARE * self.ceiling * self.devices)

    def lines(self) -> list[str]:
        """The plan as text."""
        told = [*self._totals(), *self._at_best(), *self._not_identified(), *self._short()]
        return [_HEAD, *(_line(rung) for rung in self.rungs), *told]

    def _totals(self) -> list[str]:
        # A search may need more runs than its shortest.
        least, searched = "", "one is given, none is searched for"
        if self.rate_runs:
            least, searched = "at least ", f"at least {counted(self.rate_runs, 'run')}, {self.rate_flops:.2g} FLOPs"
        return [
            f"learning rates: {searched}",
            f"in all {least}{counted(self.runs, 'run')}, {self.flops:.3g} FLOPs: about {duration(self.seconds)} on "
            f"{self.devices} × {self.device} ({self.ceiling / 1e12:.3g} TFLOP/s in products, {_USUAL_SHARE:.0%} of it) "
            "and seconds to start each run",
        ]

    def _at_best(self) -> list[str]:
        told = [f"{one.place.name}: ±{one.width / 2:.3f}" for one in self.widths]
        return [f"{100 * self.level:g} % interval of every scheme's gap, at best: {'; '.join(told)} nats"]

    def _not_identified(self) -> list[str]:
        if not self.obstacles:
            return []
        return [f"beyond the ladder not identified, whatever comes out: {'; '.join(self.obstacles)}"]

    def _short(self) -> list[str]:
        few = [f"{one.rung.size} ({_few(one.steps)})" for one in self.rungs if one.steps[0] < FEW_STEPS]
        return [f"fewer than {FEW_STEPS:,} steps, marked on the page: {', '.join(few)}"] if few else []


def _few(steps: tuple[int, int]) -> str:
    """The steps of the budgets of a size, from the smallest; the largest is named where it is too small as well."""
    low, high = steps
    return f"{low:,}" if low == high else f"{low:,} to {high:,}" if high < FEW_STEPS else f"from {low:,}"


def dry_run(config: LadderConfig, data: Any) -> DryRun:
    """Plan a ladder whose configuration has the vocabulary of its data; trains nothing."""
    plan = LadderPlan(config)
    device = torch.device("cuda" if torch.cuda.is_available() and config.base.device != "cpu" else "cpu")
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    rates = {name: FoundRate(name, 1e-3) for name in config.names}
    tune = _rate_runs(config, plan)
    return DryRun(
        device=describe(device),
        ceiling=matmul_ceiling(device, torch.bfloat16 if device.type == "cuda" else torch.float32),
        devices=max(1, torch.cuda.device_count()) if device.type == "cuda" else 1,
        rungs=tuple(_cost(config, rung, plan.judged(rung, rates), data, precision) for rung in config.rungs),
        rate_runs=len(tune), rate_flops=sum(run.work for run in tune), widths=tuple(_widths(config)),
        level=config.level,
        obstacles=tuple(own.text for own in obstacles_of_design(_cells(config), target_places(config))),
    )  # fmt: skip


def _cost(config: LadderConfig, rung: Rung, runs: list[LadderRun], data: Any, precision: Precision) -> RungCost:
    model = config.models[rung.size][config.baseline_name]
    parameters, unique = model.num_params(), data.facts()["train"]["tokens"]
    ends = (rung.budgets[0], rung.budgets[-1])
    shortest, longest = (config.run(rung, config.baseline_name, budget, 1e-3, 0) for budget in ends)
    memory = model.memory(rung.batch // config.base.accumulate, config.base.sequence, precision=precision)
    return RungCost(
        rung, parameters, embedding_share(model),
        (shortest.tokens_in_all / parameters, longest.tokens_in_all / parameters), (shortest.steps, longest.steps),
        longest.tokens_in_all / unique, (memory.compiled() if precision == "bf16" else memory).total,
        len(runs), sum(run.work for run in runs),
    )  # fmt: skip


def _rate_runs(config: LadderConfig, plan: LadderPlan) -> list[LadderRun]:
    """The runs of the shortest searches."""
    if not config.is_tuned:
        return []
    least = _COARSE_RATES + (_FINE_RATES if config.refine_rates else 0)
    tried = least if config.lrs == "auto" else len(config.lrs)
    searched = [(config.rungs[0], budget) for budget in config.search_budgets]
    if plan.rates.middle is not None:
        searched.append((plan.rates.middle, plan.rates.middle.budgets[0]))
    return [
        LadderRun("tune", name, config.run(rung, name, budget, 1e-3 * (i + 1), TUNE_SEED), rung, 1e-3)
        for rung, budget in searched
        for name in config.names
        for i in range(tried)
    ]


def _cells(config: LadderConfig) -> list[Place]:
    return [place for rung in config.rungs for place in places(config, rung)]


def _widths(config: LadderConfig) -> list[ExpectedWidth]:
    is_branched = any(len(rung.budgets) > 1 for rung in config.rungs)
    design = Design(
        cells=_cells(config), seeds=config.seeds, top_seeds=config.top_seeds, targets=target_places(config),
        is_branched=is_branched,
    )  # fmt: skip
    return expected_widths(design, bonferroni_level(config.level, len(config.names)))


_COLUMNS = {
    "size": 8, "parameters": 11, "embedding": 9, "tokens/parameter": 17, "steps": 13, "epochs": 6, "memory": 9,
    "runs": 5, "FLOPs": 8,
}  # fmt: skip
_HEAD = "  ".join(f"{name:>{width}}" for name, width in _COLUMNS.items())


def _line(one: RungCost) -> str:
    ratios = " - ".join(dict.fromkeys(ratio(own) for own in one.tokens_per_parameter))
    steps = " - ".join(f"{count:,}" for count in dict.fromkeys(one.steps))
    told = (
        str(one.rung.size), f"{one.parameters:,}", f"{one.embedding_share:.0%}", ratios, steps,
        f"{one.epochs:.2g}", size(one.memory), str(one.runs), f"{one.flops:.2g}",
    )  # fmt: skip
    return "  ".join(f"{text:>{width}}" for text, width in zip(told, _COLUMNS.values(), strict=True))
