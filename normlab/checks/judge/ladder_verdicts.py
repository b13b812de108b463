"""All verdicts on a depth ladder: one for each way in which a stack can fail, with its number, threshold and blocks.

Growth over depth is judged on the whole ladder, everything else on its deepest stack. Of the profiles before and after
the burst the worse one counts. Each number is the mean over seeds.
"""

from __future__ import annotations

import dataclasses
import math

from normlab.checks.judge.blame import blame
from normlab.checks.judge.collapse import collapse
from normlab.checks.judge.faults import UNSEEN, low_entropy, uneven
from normlab.checks.judge.growth import backward, forward, unsteady
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Level, Snapshot, Verdict, level, mean, unmeasured, upper, worst
from normlab.checks.ladder_records import Ladder

__all__ = ["Level", "Snapshot", "Thresholds", "Verdict", "judge_ladder", "level"]


def judge_ladder(
    ladder: Ladder,
    *,
    thresholds: Thresholds | None = None,
    target: int | None = None,
    unigram: float | None = None,
) -> list[Verdict]:
    """All verdicts. `target` is the depth that the gradient is judged at (none: the largest measured), `unigram` the
    unigram entropy of the data in nats: a loss that does not beat it has learnt nothing of the context.
    """
    limits = thresholds or Thresholds()
    views = [Snapshot(ladder.deepest(when)) for when in ladder.snapshots]
    return [
        forward(ladder, limits),
        backward(ladder, limits, target),
        unsteady(ladder, limits),
        collapse(views, limits, unigram),
        *(worst([rule(view, limits) for view in views]) for rule in (dead_depth, low_entropy, logits)),
        updates(views[-1], limits),
        *(worst([rule(view, limits) for view in views]) for rule in (absorption, headroom, outliers, uneven)),
    ]


def dead_depth(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on dead depth: whether the last third of the blocks still changes the direction of tokens."""
    angles, third = view.mean(lambda profile: profile.ang), view.depth // 3
    first, last = mean(angles[:third]), mean(angles[view.depth - third :])
    if first is None or last is None:
        return unmeasured("dead depth", "no angles, or fewer than three blocks")
    dead = last < limits.dead_angle and last < limits.dead_share * first
    layers = tuple(range(view.depth - third, view.depth)) if dead else ()
    # It takes both to be dead: what is fine says the one that it is fine by.
    least = f" ({limits.dead_angle:g} is the least)" if dead or last >= limits.dead_angle else ""
    share = f" ({limits.dead_share:.0%} of it is the least)" if dead or last >= limits.dead_share * first else ""
    words = f"blocks of the last third turn a token by {last:.3g} rad{least}, those of the first by {first:.3g}{share}"
    words += f" at step {view.step}"
    return Verdict(
        name="dead depth",
        finding="dead depth" if dead else "fine",
        level="warn" if dead else "ok",
        value=last,
        threshold=limits.dead_angle,
        layers=layers,
        words=words + blame(layers, view.depth),
    )


def logits(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on attention logits: whether scores are large enough to saturate the softmax."""
    scores = view.mean(lambda profile: profile.logit_max)
    if not any(score is not None for score in scores):
        return unmeasured("attention logits", UNSEEN)
    return upper(
        "attention logits", "large logits", "largest score", scores, view, limits.logit_warn, limits.logit_fail
    )


def updates(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on the update ratio ‖Δw‖ / ‖w‖ of every block in one optimiser step."""
    if not view.trained:
        return unmeasured("update ratio", "Adam's first step moves every weight by the whole rate, whatever the design")
    shares, low, high = view.mean(lambda profile: profile.upd_ratio), limits.update_low, limits.update_high
    known = {place: share for place, share in enumerate(shares) if share is not None}
    if not known:
        return unmeasured("update ratio")
    layers = tuple(place for place, share in known.items() if not low <= share <= high)
    middle = math.sqrt(low * high)
    furthest = max(known.values(), key=lambda share: abs(math.log(share / middle)) if share > 0.0 else math.inf)
    finding = "fine" if not layers else "small updates" if furthest < low else "large updates"
    words = f"weights change by {furthest:.3g} of their size a step ({low:g} to {high:g} is fine) at step {view.step}"
    return Verdict(
        name="update ratio",
        finding=finding,
        level="warn" if layers else "ok",
        value=furthest,
        threshold=low if furthest < middle else high,
        layers=layers,
        words=words + blame(layers, view.depth),
    )


def absorption(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on bf16 absorption: whether increments are lost to rounding in a bf16 residual stream."""
    shares, warn, fail = view.mean(lambda profile: profile.absorb_bf16), limits.absorb_warn, limits.absorb_fail
    return upper("bf16 absorption", "absorbed", "share of increments lost in bf16", shares, view, warn, fail)


def headroom(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on headroom: how close the state is to overflow in fp16."""
    bits = view.mean(lambda profile: profile.headroom("fp16"))
    needed = [None if x is None or math.isinf(x) else -x for x in bits]
    verdict = upper("headroom", "little headroom", "", needed, view, -limits.headroom_bits, first=-1)
    if verdict.value is None:
        return verdict
    over = verdict.value > 0.0
    words = f"{abs(verdict.value):.1f} bits {'above' if over else 'below'} the largest fp16 number"
    words += f" ({limits.headroom_bits:g} {'below it ' if over else ''}is the least)"
    where = f" at step {view.step}{blame(verdict.layers, view.depth)}"
    return dataclasses.replace(verdict, value=-verdict.value, threshold=limits.headroom_bits, words=words + where)


def outliers(view: Snapshot, limits: Thresholds) -> Verdict:
    """Verdict on outliers: whether single entries are far larger than the RMS."""
    ratios = view.mean(lambda profile: profile.outlier_ratio)
    return upper("outliers", "outliers", "largest entry over RMS", ratios, view, limits.outlier_ratio, first=-1)
