"""A second opinion: what fails at the full rate alone is a warning, what fails at both remains a failure."""

from __future__ import annotations

import pytest

from normlab.checks import check as checks
from normlab.checks import gentler_rate
from normlab.checks.burst import Burst
from normlab.checks.check import check
from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.ladder_records import Ladder
from normlab.targets import resolve
from tests.checks.synthetic import profile, slope

DEPTH = 12


def run(gain_before: float, gain_after: float, lr: float = 1e-3) -> Burst:
    looks = [
        profile(DEPTH, grad_h=slope(DEPTH, gain), step=step) for gain, step in ((gain_before, 0), (gain_after, 30))
    ]
    before, after = ({"stack": look} for look in looks)
    return Burst(before=before, after=after, losses=[1.0], lr=lr, seconds=1.0, parameters=1)


def judged(burst: Burst):
    return judge_ladder(Ladder((burst.before["stack"], burst.after["stack"])))


@pytest.mark.parametrize(
    ("before", "after", "doubted"),
    [
        (1.0, 0.5, []),
        (1.0, 0.05, ["unsteady"]),
        (1.0, 1e-4, ["backward", "unsteady"]),
        # It was lost before anything was trained: no rate can help.
        (1e-4, 1e-4, []),
        (1e-3, 1e-5, ["unsteady"]),
    ],
)
def test_what_the_burst_broke_is_in_doubt(before, after, doubted):
    burst = run(before, after)
    assert gentler_rate.in_doubt(judged(burst), burst, None) == doubted
    first_step_broke = Burst(before=burst.before, after={}, losses=[None], lr=1e-3, seconds=1.0, parameters=1)
    assert gentler_rate.in_doubt(judged(burst), first_step_broke, None) == []


@pytest.mark.parametrize(
    ("gentler", "levels"),
    [
        (0.8, {"backward": "warn", "unsteady": "warn"}),
        (0.05, {"backward": "warn", "unsteady": "fail"}),
        (1e-4, {"backward": "fail", "unsteady": "fail"}),
    ],
)
def test_a_failure_that_a_gentler_rate_cures_is_a_warning(monkeypatch, gentler, levels):
    asked = []

    def burst(target, *, depth, steps, lr):
        asked.append((depth, steps, lr))
        return run(1.0, gentler, lr)

    monkeypatch.setattr(gentler_rate, "burst", burst)
    first = run(1.0, 1e-4)
    found = gentler_rate.second_opinion(resolve("post"), first, judged(first), depth=DEPTH, steps=30)
    assert asked == [(DEPTH, 30, 2.5e-4)]
    shown = {verdict.name: verdict for verdict in found if verdict.name in levels}
    assert {name: verdict.level for name, verdict in shown.items()} == levels
    for verdict in shown.values():
        assert ("at the rate 0.001, and not at a quarter of it: it takes a warm-up" in verdict.words) == (
            verdict.level == "warn"
        )


@pytest.mark.full
@pytest.mark.parametrize(("lr", "asked"), [("auto", [12]), (1e-3, [])])
def test_a_rate_that_was_asked_for_gets_no_second_opinion(monkeypatch, lr, asked):
    heard = []

    def second_opinion(target, run, verdicts, *, depth, steps):
        heard.append(depth)
        return verdicts

    monkeypatch.setattr(checks, "second_opinion", second_opinion)
    report = check("post", depths=(12,), lr=lr)
    assert report.verdict("unsteady").level == "fail"
    assert heard == asked


def test_what_is_lost_at_a_greater_depth_alone_is_not_in_doubt():
    """G falls as L^-5 from 12 to 24 blocks after training: 0.03 at 24, which passes, and 10⁻³ at 48, which does not."""
    bursts = {12: run(1.0, 1.0), 24: deeper(0.03)}
    looks = [look["stack"] for burst in bursts.values() for look in (burst.before, burst.after)]
    verdicts = judge_ladder(Ladder(tuple(looks)), target=48)
    assert {v.name for v in verdicts if v.level == "fail"} == {"backward", "unsteady"}
    # Another burst at 24 blocks says nothing of 48.
    assert gentler_rate.in_doubt(verdicts, bursts[24], None) == ["unsteady"]


def deeper(gain_after: float) -> Burst:
    looks = [profile(24, grad_h=slope(24, gain), step=step) for gain, step in ((1.0, 0), (gain_after, 30))]
    before, after = ({"stack": look} for look in looks)
    return Burst(before=before, after=after, losses=[1.0], lr=1e-3, seconds=1.0, parameters=1)
