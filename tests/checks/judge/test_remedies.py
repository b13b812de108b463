"""Remedies: every finding has one, the cheapest comes first, and none contradicts another."""

from __future__ import annotations

import pytest

from normlab.checks.judge.growth_laws import FORWARD_ORDER
from normlab.checks.judge.ladder_verdicts import Verdict
from normlab.checks.judge.remedies import COSTS, MENU, remedies

FINDINGS = (
    *(("forward", name) for name in FORWARD_ORDER if name in ("super-linear", "exploding", "shrinking")),
    *(("backward", name) for name in ("vanishing", "exploding")),
    *(("other", name) for name in ("unsteady", "collapse", "dead depth", "low entropy", "large logits", "uneven")),
    *(("other", name) for name in ("small updates", "large updates", "absorbed", "little headroom", "outliers")),
    *(("untrained", name) for name in ("untrained", "detached")),
    *(("leaks", name) for name in ("sees the future", "mixes samples")),
    *(("structure", name) for name in ("no norm", "no final norm", "norm off", "skip gain")),
    *(("start", name) for name in ("echo", "high first loss")),
)


@pytest.mark.parametrize(("name", "finding"), FINDINGS)
def test_every_finding_has_a_remedy_and_the_cheapest_comes_first(name, finding):
    chosen = remedies([Verdict(name=name, finding=finding, level="fail")])
    assert chosen
    costs = [COSTS.index(remedy.cost) for remedy in chosen]
    assert costs == sorted(costs)


def test_remedies_follow_the_finding():
    def words(name: str, finding: str) -> str:
        return " ".join(remedy.words for remedy in remedies([Verdict(name=name, finding=finding, level="warn")]))

    assert "clipping" in words("backward", "exploding")
    assert "clipping" not in words("forward", "exploding")
    assert "query-key" in words("attention logits", "large logits")
    assert remedies([Verdict(name="forward", finding="exploding", level="ok")]) == []


def test_remedies_do_not_contradict_each_other():
    def words(*findings: str) -> str:
        return " ".join(r.words for r in remedies([Verdict(name="x", finding=f, level="warn") for f in findings]))

    assert "learning rate" not in words("large updates", "small updates")
    assert "learning rate" in words("large updates")
    assert "step Δt" not in words("super-linear", "dead depth")
    # A fault in the wiring comes first: no setting cures what follows from it.
    assert words("no norm", "exploding", "large updates") == words("no norm")


def test_no_remedy_is_for_a_finding_that_does_not_exist():
    known = {finding for _, finding in FINDINGS} | {"exploding gradient", "mixing gain"}
    assert {cure for remedy in MENU for cure in remedy.cures} <= known
