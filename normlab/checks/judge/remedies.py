"""Remedies: what to change for each finding, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from normlab.checks.judge.ladder_verdicts import Verdict

Cost = Literal["setting", "initialisation", "architecture"]
COSTS: tuple[Cost, ...] = ("setting", "initialisation", "architecture")
"""What a remedy changes, cheapest first: a training setting, the initialisation, the architecture."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One suggested change."""

    words: str
    cost: Cost
    cures: frozenset[str]
    """Findings that it helps against."""
    turns: str = ""
    """What it increases or decreases, e.g. "rate up"; if its opposite is suggested as well, both are dropped."""


def _remedy(words: str, cost: Cost, *cures: str, turns: str = "") -> Remedy:
    return Remedy(words=words, cost=cost, cures=frozenset(cures), turns=turns)


_GROWTH = ("exploding", "super-linear")

ROOTS = frozenset(
    {"untrained", "detached", "sees the future", "mixes samples", "no norm", "no final norm", "norm off", "skip gain"}
)
"""Faults in the structure of a model: other findings may be their effect, and no setting repairs them."""

MENU: tuple[Remedy, ...] = (
    _remedy("a lower learning rate", "setting", "large updates", "unsteady", turns="rate down"),
    _remedy("a higher learning rate, or less weight decay", "setting", "small updates", turns="rate up"),
    _remedy("an epsilon of the norms far below the square of the state: 1e-6 to 1e-5", "setting", "norm off"),
    _remedy("a longer warm-up", "setting", "vanishing", "collapse", "unsteady", "large updates"),
    _remedy("z-loss", "setting", "low entropy", "large logits"),
    _remedy("gradient clipping", "setting", "exploding gradient"),
    _remedy(
        "a smaller residual step Δt", "setting", *_GROWTH, "exploding gradient", "little headroom", turns="step down"
    ),
    _remedy("a larger residual step Δt in late blocks", "setting", "dead depth", turns="step up"),
    _remedy("a larger residual step Δt", "setting", "absorbed", turns="step up"),
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
    _remedy("a head of its own: tied=False, tie_word_embeddings=False", "setting", "echo"),
    _remedy("a smaller initial deviation of the head's matrix", "initialisation", "high first loss", "echo"),
    _remedy(
        "the module named connected to the output: no detach(), no no_grad() around it, nothing left unused; freeze or "
        "remove what is not to be trained",
        "architecture",
        "untrained",
        "detached",
    ),
    _remedy(
        "a mask that hides later keys in every block, and norms over the channels of one token alone",
        "architecture",
        "sees the future",
    ),
    _remedy(
        "norms over the channels of one token (the last dimension), not over samples", "architecture", "mixes samples"
    ),
    _remedy("a norm before each branch (Pre-Norm), or one after each addition", "architecture", "no norm"),
    _remedy("a norm between the last block and the head", "architecture", "no final norm", "high first loss"),
    _remedy("a skip that leaves the state as it is, x + f(x): gains on branches alone", "architecture", "skip gain"),
    _remedy("a norm on the output of each branch", "architecture", *_GROWTH, "exploding gradient", "absorbed"),
    _remedy("a query-key norm", "architecture", "low entropy", "large logits"),
    _remedy("a cap on the attention logits", "architecture", "low entropy", "large logits"),
    _remedy("a gate on the attention output, or a sink that is not a token", "architecture", "outliers"),
    _remedy("a norm whose gain falls with depth", "architecture", "dead depth"),
    _remedy("doubly stochastic mixing of the streams, as mhc has it", "architecture", "mixing gain"),
    _remedy(
        "a skip that no norm interrupts: mixed, scaled or spanning in place of a norm after every addition",
        "architecture",
        "vanishing",
        "collapse",
        "unsteady",
    ),
)


def remedies(verdicts: Iterable[Verdict]) -> list[Remedy]:
    """Remedies for these findings: cheapest first; at equal cost those for more findings first."""
    found = {_ailment(verdict) for verdict in verdicts if verdict.level != "ok"}
    if found & ROOTS:
        found &= ROOTS | {"echo"}
    chosen = [remedy for remedy in MENU if remedy.cures & found]
    turns = {remedy.turns for remedy in chosen}
    chosen = [remedy for remedy in chosen if _opposite(remedy.turns) not in turns]
    return sorted(chosen, key=lambda remedy: (COSTS.index(remedy.cost), -len(remedy.cures & found)))


def _opposite(turns: str) -> str | None:
    what, _, way = turns.rpartition(" ")
    return f"{what} {'down' if way == 'up' else 'up'}" if turns else None


def _ailment(verdict: Verdict) -> str:
    """The finding; exploding gradients get a name of their own, because clipping helps against those alone."""
    return "exploding gradient" if (verdict.name, verdict.finding) == ("backward", "exploding") else verdict.finding
