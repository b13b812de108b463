"""What to change: remedies by what they cure, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from normlab.stability.verdicts import Verdict

Cost = Literal["setting", "initialisation", "architecture"]
COSTS: tuple[Cost, ...] = ("setting", "initialisation", "architecture")
"""What has to change, cheapest first: a number of the run, how weights start, the model itself."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to try."""

    words: str
    cost: Cost
    cures: frozenset[str]
    """Findings that it helps against."""


def _remedy(words: str, cost: Cost, *cures: str) -> Remedy:
    return Remedy(words=words, cost=cost, cures=frozenset(cures))


_GROWTH = ("exploding", "super-linear")

MENU: tuple[Remedy, ...] = (
    _remedy("a lower learning rate", "setting", "large updates", "unsteady"),
    _remedy("a higher learning rate, or less weight decay", "setting", "small updates"),
    _remedy("a longer warm-up", "setting", "vanishing", "collapse", "unsteady", "large updates"),
    _remedy("z-loss", "setting", "low entropy", "large logits"),
    _remedy("gradient clipping", "setting", "exploding gradient"),
    _remedy("a smaller residual step Δt", "setting", *_GROWTH, "exploding gradient", "little headroom"),
    _remedy("a larger residual step Δt in late blocks", "setting", "dead depth"),
    _remedy("a larger residual step Δt", "setting", "absorbed"),
    _remedy("a slower decay of the step over depth", "setting", "dead depth"),
    _remedy("the residual stream in fp32", "setting", "absorbed"),
    _remedy("bf16 in place of fp16", "setting", "little headroom"),
    _remedy("check the blocks named: their initialisation or their loaded weights differ", "initialisation", "uneven"),
    _remedy(
        "a smaller gain on each branch's last matrix, or one that falls with depth",
        "initialisation",
        *_GROWTH,
        "exploding gradient",
        "vanishing",
        "collapse",
        "unsteady",
    ),
    _remedy("a larger initial scale of embeddings or branches", "initialisation", "shrinking"),
    _remedy("a norm on the output of each branch", "architecture", *_GROWTH, "exploding gradient", "absorbed"),
    _remedy("a query-key norm", "architecture", "low entropy", "large logits"),
    _remedy("a cap on the attention logits", "architecture", "low entropy", "large logits"),
    _remedy("a gate on the attention output, or a sink that is not a token", "architecture", "outliers"),
    _remedy("a norm whose gain falls with depth", "architecture", "dead depth"),
    _remedy(
        "a skip that no norm interrupts: mixed, scaled or spanning in place of a norm after every addition",
        "architecture",
        "vanishing",
        "collapse",
        "unsteady",
    ),
)


def remedies(verdicts: Iterable[Verdict]) -> list[Remedy]:
    """The remedies for what was found, cheapest first, those that cure more findings before others of the same cost."""
    found = {_ailment(verdict) for verdict in verdicts if verdict.level != "ok"}
    chosen = [remedy for remedy in MENU if remedy.cures & found]
    return sorted(chosen, key=lambda remedy: (COSTS.index(remedy.cost), -len(remedy.cures & found)))


def _ailment(verdict: Verdict) -> str:
    """The finding, with the two explosions told apart: clipping helps against one of them alone."""
    return "exploding gradient" if (verdict.name, verdict.finding) == ("backward", "exploding") else verdict.finding
