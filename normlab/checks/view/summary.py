"""Headline, causes and caveats of a check in words: shared by the card, the page and a comparison of two."""

from __future__ import annotations

from normlab.checks.judge.blame import blocks
from normlab.checks.judge.remedies import ROOTS
from normlab.checks.judge.verdict import Level, Verdict
from normlab.checks.result import Check
from normlab.pages.numbers import format_count, join_names
from normlab.utils.text import capitalised

MARKS: dict[Level, str] = {"ok": "✓", "warn": "!", "fail": "✗"}
"""Marks of the levels, readable without colour."""
UNMEASURED = "·"

_FATES = {
    ("forward", "exploding"): "explode",
    ("backward", "exploding"): "blow up its gradient",
    ("backward", "vanishing"): "lose its gradient",
    ("unsteady", "unsteady"): "upset its gradient within a few steps",
    ("collapse", "collapse"): "collapse its tokens into one",
    ("attention logits", "large logits"): "saturate its attention",
    ("bf16 absorption", "absorbed"): "round its updates away in bf16",
    ("norm drift", "norm drift"): "let its tokens drift from their length",
    ("mixing", "mixing gain"): "blow up its streams by mixing them",
}
"""Consequence of a failing verdict, after "will"."""
_FAULTS = {
    ("untrained", "untrained"): "does not train all of its parameters",
    ("untrained", "detached"): "passes no gradient through some of its branches",
    ("leaks", "sees the future"): "sees the future",
    ("leaks", "mixes samples"): "mixes the samples of a batch",
    ("structure", "no norm"): "has branches without a norm",
    ("structure", "no final norm"): "has no norm before its head",
    ("structure", "norm off"): "has norms that their epsilon switches off",
    ("structure", "skip gain"): "multiplies its state on every skip",
    ("start", "echo"): "starts by repeating the token it has just read",
    ("start", "high first loss"): "starts above the loss of a guess",
    ("start", "not finite"): "starts with a loss that is not finite",
}
"""Meaning of a failing verdict that does not depend on depth."""
_BY_RATE = {("backward", "vanishing"), ("backward", "exploding"), ("unsteady", "unsteady")}
"""Findings that are warnings only if a lower learning rate cured them."""
_MOST_FATES = 2
"""Largest number of consequences in a headline."""

_MEANINGS = {
    ("forward", "exploding"): "The state grows by a factor with every block: deeper, it leaves every number format.",
    ("forward", "super-linear"): "The state grows faster than its depth: every block adds more than the one before.",
    ("forward", "shrinking"): "The state becomes smaller with depth, until what the embeddings put in is lost.",
    ("backward", "exploding"): "The first blocks get far more gradient than the last: no learning rate suits both.",
    ("backward", "vanishing"): "The first blocks get next to no gradient, so they do not learn.",
    (
        "unsteady",
        "unsteady",
    ): "A few steps of training changed the gradient by orders of magnitude: what looks healthy "
    "at the start does not last.",
    ("collapse", "collapse"): "After the last block all tokens of a sequence point the same way: the model cannot tell "
    "them apart.",
    ("dead depth", "dead depth"): "The last blocks hardly turn the tokens any more: depth that costs and does little.",
    ("attention", "low entropy"): "Some attention heads see a single key, where the softmax passes no gradient.",
    ("attention logits", "large logits"): "Attention scores are so large that the softmax saturates.",
    (
        "update ratio",
        "small updates",
    ): "A step hardly changes the weights of some blocks: they learn slowly, if at all.",
    ("update ratio", "large updates"): "A step changes the weights of some blocks by more than they can bear.",
    (
        "bf16 absorption",
        "absorbed",
    ): "Much of what blocks add is smaller than the last digit of a bf16 state: it is lost.",
    ("headroom", "little headroom"): "The state comes close to the largest number that fp16 can hold.",
    ("outliers", "outliers"): "Single entries dwarf the rest of the state, which costs digits in low precision.",
    ("uneven", "uneven"): "A block behaves unlike all its neighbours: that is a fault rather than a law.",
    ("norm drift", "norm drift"): "Tokens change their length where the scheme promises to keep it.",
    ("mixing", "mixing gain"): "The mixing of residual streams multiplies a stream, or its gradient, through depth.",
    ("untrained", "untrained"): "Some parameters get no gradient: they stay as they were drawn, and add noise.",
    ("untrained", "detached"): "Some branches read a detached state: what lies below cannot learn what they need.",
    ("leaks", "sees the future"): "An output depends on later tokens: its loss in training is not what it will be when "
    "it writes.",
    ("leaks", "mixes samples"): "An output depends on other samples of its batch: it will answer otherwise alone.",
    ("structure", "no norm"): "Nothing sets the size of what some branches read: they follow the state, and the state "
    "follows them.",
    ("structure", "no final norm"): "The head reads a state whose size depends on depth and training: logits grow with "
    "it.",
    (
        "structure",
        "norm off",
    ): "An epsilon far above the square of what a norm reads: it divides by a constant, and sets no size.",
    (
        "structure",
        "skip gain",
    ): "Every skip multiplies the state: it grows or shrinks by that factor to the power of the depth.",
    ("start", "echo"): "Before its first step the model is sure that the next token is the one it has just read, and "
    "has to unlearn that first.",
    ("start", "high first loss"): "Before its first step the model is surer of itself than random logits make it.",
    ("start", "not finite"): "Before its first step the loss is not a finite number: there is nothing to train on.",
    ("certificate", "certificate violated"): "The state is larger than is possible if model and bound are both right.",
}
"""Meaning of a finding."""

_CAUSES = (
    (
        ("attention logits", "large logits"),
        ("backward", "exploding"),
        "The gradient grows because attention scores do: it passes a softmax in proportion to what the scores are "
        "made of. A query-key norm bounds both.",
    ),
    (
        ("collapse", "collapse"),
        ("backward", "vanishing"),
        "The gradient is lost because tokens have become one: attention over equal tokens passes no difference on.",
    ),
)
"""(cause, effect, sentence if both were found)."""

_GROWTH = {
    "bounded": "The size of the state does not depend on depth",
    "shrinking": "The state becomes smaller with depth",
    "random walk": "The state grows like a random walk, about as the square root of depth",
    "linear": "The state grows about in proportion to depth",
    "common part": "The state grows faster than depth for now, by a part that all tokens have in common",
    "super-linear": "The state grows faster than depth",
}


def headline(check: Check) -> str:
    """The headline: "Will explode when deep: block 17"."""
    failures = [verdict for verdict in check.verdicts if verdict.level == "fail"]
    violated = next((verdict for verdict in failures if verdict.name == "certificate"), None)
    if violated is not None:
        return f"A proven bound is violated, by a fault in the model or in the bound{_where([violated], check)}"
    if failures:
        return capitalised(f"{join_names(_faults(failures))}{_where(failures, check)}")
    growth = f"Stable at {check.depth} blocks" if is_judged(check) else f"No alarm at {check.depth} blocks"
    by_rate = [verdict for verdict in check.trouble if _key(verdict) in _BY_RATE]
    growth += f" after a warm-up, without which it will {join_names(fates(by_rate))}" if by_rate else ""
    warned = [verdict.finding for verdict in check.trouble if verdict not in by_rate]
    return f"{growth}, but {join_names(warned)}" if warned else growth


def _faults(failures: list[Verdict]) -> list[str]:
    """Faults of a design at its own depth, then what happens when it is deep."""
    present = [_FAULTS[_key(verdict)] for verdict in failures if _key(verdict) in _FAULTS][:_MOST_FATES]
    later = fates([verdict for verdict in failures if _key(verdict) not in _FAULTS])
    return [*present, *([f"will {join_names(later)} when deep"] if later else [])]


def _key(verdict: Verdict) -> tuple[str, str]:
    return verdict.name, verdict.finding


def sentence(check: Check) -> str:
    """The headline with the name in front: "post will collapse its tokens into one when deep"."""
    said = headline(check)
    said = said[0].lower() + said[1:]
    verbs = {"will", *(words.split()[0] for words in _FAULTS.values())}
    first = said.split()[0]
    link = " " if first in verbs else " is " if first == "stable" else ": "
    return f"{check.target.name}{link}{said}"


def fates(failures: list[Verdict]) -> list[str]:
    """What happens to a model with these failures, the worst first."""
    found = {(verdict.name, verdict.finding) for verdict in failures}
    # What goes without saying: a lost gradient has moved, and an exploding state takes its gradient along.
    implied = {("backward", "exploding")} if ("forward", "exploding") in found else set()
    implied |= {("unsteady", "unsteady")} if any(name == "backward" for name, _ in found) else set()
    told = [(v.name, v.finding) for v in failures if (v.name, v.finding) not in implied]
    return [_FATES.get(key, f"fail ({key[1]})") for key in told][:_MOST_FATES]


def meanings(check: Check) -> list[str]:
    """The findings as sentences; for a healthy stack, how state and gradient behave."""
    worst = [verdict for verdict in check.trouble if verdict.level == check.level]
    found = [words for verdict in worst if (words := _meaning(verdict))]
    return [*found, *causes(check)] if check.level == "fail" else [*found, *_healthy(check)]


def _meaning(verdict: Verdict) -> str | None:
    """Meaning of a finding; a milder sentence for a warning."""
    if verdict.level == "warn" and verdict.name == "collapse":
        return "After the last block the tokens of a sequence are nearly alike, though the model learns so far."
    if verdict.level == "warn" and _key(verdict) in _BY_RATE:
        return f"{_MEANINGS[_key(verdict)]} At a quarter of the rate it does not happen."
    return _MEANINGS.get(_key(verdict))


def causes(check: Check) -> list[str]:
    """Sentences on findings that explain others."""
    found = {_key(verdict) for verdict in check.trouble}
    explained = [words for cause, effect, words in _CAUSES if {cause, effect} <= found]
    roots = [verdict for verdict in check.trouble if verdict.finding in ROOTS]
    others = [verdict.finding for verdict in check.trouble if verdict not in roots and verdict.name != "start"]
    if not roots or not others:
        return explained
    return [f"Mend this first and check again: {join_names([*dict.fromkeys(others)])} may follow from it."]


def _healthy(check: Check) -> list[str]:
    """How the state and the gradient of a stack behave that does not fail, and how far from its bound it stays."""
    forward, backward = check.verdict("forward"), check.verdict("backward")
    lines = []
    if forward.finding in _GROWTH and forward.value is not None:
        lines.append(f"{_GROWTH[forward.finding]} (RMS ∝ L^{forward.value:.2f}).")
    if backward.value is not None:
        lines.append(f"The first block gets {backward.value:.3g} times the gradient of the last.")
    used = check.theory.looks[-1].use if check.theory and check.theory.looks else None
    if used is not None:
        lines.append(f"After the last block it uses {100 * used:.3g} % of its proven bound.")
    return lines


def reason(verdict: Verdict) -> str:
    """A verdict's text without its finding, which is shown beside it."""
    return verdict.words.removeprefix(f"{verdict.finding}: ")


def is_judged(check: Check) -> bool:
    """Whether growth over depth could be judged at all."""
    return check.verdict("forward").finding != "not judged"


def subtitle(check: Check) -> str:
    """What was checked: kind, size, what it was built with."""
    target = check.target
    width = f", width {target.width}" if target.width else ""
    size = f", {format_count(target.parameters)} parameters" if target.parameters else ""
    return f"{target.kind}, {target.depth} blocks{width}{size}"


def caveats(check: Check) -> list[str]:
    """What was changed in the target and what was left out of the check."""
    open_ = [] if is_judged(check) else [check.verdict("forward").words]
    return [*check.target.notes, *check.notes, *open_]


def mark(verdict: Verdict) -> str:
    return UNMEASURED if is_open(verdict) else MARKS[verdict.level]


def is_open(verdict: Verdict) -> bool:
    """Whether the verdict could not be reached."""
    return verdict.finding in ("not measured", "not judged")


def open_words(verdict: Verdict) -> str:
    """An open verdict and why it is open: "attention (no call of it was seen)"."""
    why = verdict.words.removeprefix("not measured").removeprefix(": ")
    return f"{verdict.name} ({why})" if why else verdict.name


def depth_of(verdict: Verdict, check: Check) -> int:
    """Blocks of the stack that a verdict's blocks are counted in."""
    return max(verdict.depth or check.depth, *(layer + 1 for layer in verdict.layers), 1)


def _where(failures: list[Verdict], check: Check) -> str:
    """The blocks of the first failure that names some, unless it blames them all."""
    named = next((verdict for verdict in failures if verdict.layers), None)
    depth = depth_of(named, check) if named else 0
    return f": {blocks(named.layers, depth)}" if named and len(named.layers) < depth else ""
