"""Verdict on representation collapse: whether the tokens of a sequence have become alike.

A stack that mixes too much leaves nothing that tells the tokens of a sequence apart, and cannot get it back. Training
makes tokens alike as well, for a while and for another reason: how often each token occurs is learnt first, it is the
same everywhere, and a stack without biases can say it only by a part that all its states have in common. So tokens that
are alike must be so again when what all tokens of the batch share, their mean, is taken off; or lie so near to it that
a bf16 state could not hold the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normlab.checks.judge.blame import blame, upwards
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Snapshot, Verdict, over, unmeasured, worst
from normlab.probes.profile import Number

_CLEARLY = 0.98
"""A loss below this share of the unigram entropy is not by chance: three standard deviations of 384 tokens."""

_HALF = 0.5
"""The same as a share of the initial loss, if that entropy is unknown: token frequencies of a text save a third."""

_NEARER = 0.5
"""Share of the initial 1 − cosine below which tokens have become more alike."""


@dataclass(frozen=True)
class TokenSpread:
    """How alike the tokens of a sequence are at one boundary, with and without the mean of all tokens."""

    cosine: Number
    rank: Number
    rest_cosine: Number
    rest_rank: Number
    spread: Number

    @property
    def measured(self) -> bool:
        return self.cosine is not None or self.rank is not None

    @property
    def rest_measured(self) -> bool:
        return self.rest_cosine is not None or self.rest_rank is not None

    def alike(self, limits: Thresholds) -> bool:
        return over(self.cosine, limits.cosine) or under(self.rank, limits.rank)

    def same(self, limits: Thresholds) -> bool:
        """Alike, and not only by a component common to all tokens, as far as that was measured."""
        rest_alike = over(self.rest_cosine, limits.cosine) or under(self.rest_rank, limits.rank)
        return self.alike(limits) and (rest_alike or not self.rest_measured or under(self.spread, limits.spread))

    def words(self, limits: Thresholds) -> str:
        if self.alike(limits) and not self.same(limits):
            return self._without_mean(limits)
        limit = f"({limits.cosine:g} is the limit)"
        shown = [] if self.cosine is None else [f"top token cosine {near_one(self.cosine)} {limit}"]
        shown += [] if self.rank is None else [f"effective rank {self.rank:.1f} ({limits.rank:g} is the least)"]
        return ", ".join(shown + ([self._rest(limits)] if self.alike(limits) and self.rest_measured else []))

    def _without_mean(self, limits: Thresholds) -> str:
        """For tokens that share a component: the same measures without it."""
        rest, rank, limit = self.rest_cosine, self.rest_rank, f"({limits.cosine:g} is the limit)"
        known = [] if rest is None else [f"top token cosine {near_one(rest)} {limit}"]
        known += [] if rank is None else [f"effective rank {rank:.1f} ({limits.rank:g} is the least)"]
        together = "" if self.cosine is None else f", {near_one(self.cosine)} with it"
        return f"{', '.join(known)} without the mean of all tokens{together}"

    def _rest(self, limits: Thresholds) -> str:
        if self.spread is not None and self.spread < limits.spread:
            return f"tokens differ by {self.spread:.2g} of their size ({limits.spread:.2g} is the least)"
        cosine = [] if self.rest_cosine is None else [f"cosine {near_one(self.rest_cosine)}"]
        rank = [] if self.rest_rank is None else [f"rank {self.rest_rank:.1f}"]
        return f"{' and '.join(cosine + rank)} without the mean of all tokens"


def collapse(views: Sequence[Snapshot], limits: Thresholds, unigram: float | None = None) -> Verdict:
    """Whether the tokens of a sequence have become alike: a failure after the burst, unless the model learns.

    At step 0, and where the loss shows that the model tells tokens apart, it is a warning.
    """
    learns = _learns(views, unigram)
    stuck = _stuck(views, unigram)
    return worst([*([stuck] if stuck else []), *(_judged(view, limits, learns) for view in views)])


def _judged(view: Snapshot, limits: Thresholds, learns: bool) -> Verdict:
    tokens = _boundaries(view)
    top = tokens[-1]
    if not top.measured:
        return unmeasured("collapse")
    same = top.same(limits)
    layers = upwards([boundary.same(limits) for boundary in tokens])
    by_rank = top.cosine is None or (under(top.rank, limits.rank) and not over(top.cosine, limits.cosine))
    excuse = ", though the model learns" if same and view.trained and learns else ""
    return Verdict(
        name="collapse",
        finding="collapse" if same else "common direction" if top.alike(limits) else "fine",
        level="ok" if not same else "fail" if view.trained and not learns else "warn",
        value=top.rank if by_rank else top.cosine,
        threshold=limits.rank if by_rank else limits.cosine,
        layers=layers,
        words=f"{top.words(limits)}{excuse} at step {view.step}{blame(layers, view.depth)}",
    )


def _boundaries(view: Snapshot) -> list[TokenSpread]:
    series = (
        view.mean(lambda profile: profile.cos),
        view.mean(lambda profile: profile.erank),
        view.mean(lambda profile: profile.cos_rest),
        view.mean(lambda profile: profile.erank_rest),
        view.mean(lambda profile: profile.spread),
    )
    return [TokenSpread(*numbers) for numbers in zip(*series, strict=True)]


def _learns(views: Sequence[Snapshot], unigram: float | None) -> bool:
    """Whether the last loss is below the unigram entropy: the model uses the context."""
    first, last = (view.number(lambda profile: profile.loss) for view in (views[0], views[-1]))
    if first is None or last is None:
        return False
    return last < (_HALF * first if unigram is None else _CLEARLY * unigram)


def _stuck(views: Sequence[Snapshot], unigram: float | None) -> Verdict | None:
    """Collapse without a high cosine: tokens became more alike, and the loss is above the unigram entropy."""
    if len(views) < 2 or unigram is None or views[0].depth != views[1].depth:
        return None
    before, after = (_cosine(view) for view in views)
    loss = views[1].number(lambda profile: profile.loss)
    if before is None or after is None or loss is None or loss < unigram:
        return None
    # Nearer by half at least: in a burst that is too short to learn anything the cosine goes up and down a little.
    if 1.0 - after > _NEARER * (1.0 - before):
        return None
    words = (
        f"token cosine rose from {near_one(before)} to {near_one(after)}, the mean of all tokens taken off, and the "
    )
    words += f"loss {loss:.3f} does not beat {unigram:.3f} nats, the unigram entropy"
    return Verdict(name="collapse", finding="collapse", level="fail", value=loss, threshold=unigram, words=words)


def _cosine(view: Snapshot) -> Number:
    """Token cosine of the last state, without the mean of all tokens if that was measured."""
    top = _boundaries(view)[-1]
    return top.rest_cosine if top.rest_measured else top.cosine


def near_one(cosine: float) -> str:
    """Format a number near one: three decimals, or as many as show the difference from one."""
    return f"{cosine:.{3 if cosine < 0.9995 else 6}f}"


def under(x: Number, limit: float) -> bool:
    return x is not None and x < limit
