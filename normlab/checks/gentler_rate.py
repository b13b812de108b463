"""Repeat a failed burst at a lower learning rate: does the design fail, or the full rate without warm-up?

A burst has no time for a warm-up, and some designs need one: with a norm after every addition (BERT) the gradient
profile breaks within thirty steps at the full rate, and hardly changes at a quarter of it. What fails at both rates is
the design's own fault; what fails at the full rate alone becomes a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from normlab.checks.burst import Burst, burst
from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.verdict import Verdict
from normlab.checks.ladder_records import Ladder
from normlab.targets.target import Target

SHARE = 0.25
"""The lower rate as a fraction of the automatic one."""

_BY_TRAINING = ("backward", "unsteady", "collapse")
"""Verdicts that training can change from fine to failed."""


def in_doubt(verdicts: Sequence[Verdict], run: Burst, unigram: float | None) -> list[str]:
    """Verdicts that fail after the burst `run` itself and were fine before it.

    What fails only where the gradient is extrapolated to a greater depth, another burst at this one cannot disprove.
    """
    failed = {verdict.name for verdict in verdicts if verdict.level == "fail"} & set(_BY_TRAINING)
    failed_before = _failed([Ladder((profile,)) for profile in run.before.values()], unigram)
    failed_after = _failed([Ladder((run.before[name], after)) for name, after in run.after.items()], unigram)
    return sorted(failed & failed_after - failed_before)


def second_opinion(
    target: Target, run: Burst, verdicts: Sequence[Verdict], *, depth: int | None, steps: int
) -> list[Verdict]:
    """The verdicts, with failures of the burst `run` turned into warnings if a burst at a lower rate has none."""
    doubted = set(in_doubt(verdicts, run, target.unigram))
    gentle = burst(target, depth=depth, steps=steps, lr=SHARE * run.lr)
    looks = [Ladder((gentle.before[name], after)) for name, after in gentle.after.items()]
    cured = doubted - _failed(looks, target.unigram) if looks else set()
    return [_softened(verdict, run.lr) if verdict.name in cured else verdict for verdict in verdicts]


def _failed(ladders: Sequence[Ladder], unigram: float | None) -> set[str]:
    found = [verdict for ladder in ladders for verdict in judge_ladder(ladder, unigram=unigram)]
    return {verdict.name for verdict in found if verdict.level == "fail"}


def _softened(verdict: Verdict, rate: float) -> Verdict:
    words = f"{verdict.words}; at the rate {rate:.2g}, and not at a quarter of it: it takes a warm-up"
    return dataclasses.replace(verdict, level="warn", words=words)
