"""Designs whose fate is known get the verdict that is known: at one seed and 48 blocks or 96, at three seeds and 24."""

from __future__ import annotations

import math

import pytest

import normlab
from normlab.checks.judge.growth_laws import p_depth
from normlab.checks.result import Check
from tests.checks.reports import report

# A check goes to 48 blocks by itself.
SHALLOW, DEEP, DEEPER = (12, 24), None, (12, 24, 48, 96)
SEEN_DEEP = ("none", "post", "pre", "peri", "geonorm", "ngpt")
"""Schemes that some other test here takes to 48 blocks."""

pytestmark = pytest.mark.full


def deep_or_often(deep: tuple[int, ...] | None = DEEP, often: tuple[int, ...] = SHALLOW) -> pytest.MarkDecorator:
    """One seed at great depths, and three seeds at others."""
    return pytest.mark.parametrize(("depths", "seeds"), [(deep, 1), (often, 3)], ids=["deep", "three-seeds"])


def angles(check: Check) -> tuple[float, float]:
    """How far the blocks of the first third and of the last turn a token after the burst, mean over seeds."""
    third = check.depth // 3
    rows = [profile.ang for profile in check.ladder.deepest("after")]
    ends = [[sum(row[:third]) / third for row in rows], [sum(row[-third:]) / third for row in rows]]
    first, last = (sum(end) / len(end) for end in ends)
    return first, last


@deep_or_often()
def test_none_explodes(depths, seeds):
    check = report("none", depths, seeds)
    assert check.verdict("forward").finding == "exploding"
    assert check.verdict("backward").finding == "exploding"
    assert check.failed(check.config["fail_on"])


@deep_or_often(often=(24, 48))  # not every seed is lost at 24 blocks
def test_post_looks_healthy_at_the_start_and_is_caught_after_the_burst(depths, seeds):
    check = report("post", depths, seeds)
    for before, after in zip(check.ladder.deepest("before"), check.ladder.deepest("after"), strict=True):
        assert 0.1 < before.G < 10.0
        assert after.G < 1e-2
        assert after.cos[-1] > 0.95
        assert after.loss > 0.98 * check.target.unigram
    assert check.verdict("forward").finding == "bounded"
    assert check.verdict("backward").finding == "vanishing"
    assert "at step 30" in check.verdict("backward").words
    assert check.verdict("unsteady").finding == "unsteady"
    assert check.verdict("unsteady").value > 100.0
    assert check.verdict("collapse").level == "fail"


@deep_or_often()
@pytest.mark.parametrize("scheme", ["pre", "pre(depth_init=False)"])
def test_pre_grows_between_square_root_and_linear_and_slows_down(scheme, depths, seeds):
    check = report(scheme, depths, seeds)
    law = p_depth(check.ladder, "after")
    # Training has begun to align what the blocks add: between ½ and 1. At 24 blocks it has not come as far.
    least = 0.5 if depths is DEEP else 0.3
    assert least < law.exponent < 1.0
    assert check.verdict("forward").finding in ("random walk", "linear")
    first, last = angles(check)
    assert last < 0.8 * first
    assert check.verdict("backward").finding == "power law"
    assert check.verdict("collapse").level == "ok"
    assert not check.failed(check.config["fail_on"])


@deep_or_often()
def test_peri_stays_within_its_certificate(depths, seeds):
    check = report("peri", depths, seeds)
    assert check.verdict("certificate").level == "ok"
    assert len(check.theory.looks) == 2
    for look, profile in zip(check.theory.looks, (check.profile("before"), check.profile("after")), strict=True):
        assert all(size <= bound for size, bound in zip(profile.rms, look.certificate, strict=True))
        # No idle bound: two unit increments a block that know nothing of each other come to √(2L), in training to more.
        assert profile.rms[-1] > 0.8 * math.sqrt(2 * profile.depth)
    assert check.verdict("forward").finding in ("random walk", "linear")
    assert check.level != "fail"


@deep_or_often()
def test_peri_with_a_small_step_grows_least(depths, seeds):
    small = report("peri(step=0.1)", depths, seeds)
    assert small.verdict("forward").finding == "random walk"
    for scheme in ("pre", "peri"):
        other = report(scheme, depths, seeds)
        pairs = zip(small.ladder.deepest("after"), other.ladder.deepest("after"), strict=True)
        assert all(a.rms[-1] / a.rms[0] < b.rms[-1] / b.rms[0] for a, b in pairs)
    assert small.level != "fail"


@deep_or_often()
@pytest.mark.parametrize("scheme", ["geonorm", "ngpt"])
def test_norms_that_are_kept_are_kept_to_rounding(scheme, depths, seeds):
    check = report(scheme, depths, seeds)
    for profile in check.ladder.profiles:
        # Two steps a block, each a few roundings of 2⁻²⁴ that add up at worst.
        slack = 2 * profile.depth * 8 * 2.0**-24
        assert all(abs(size / profile.rms[0] - 1.0) <= slack for size in profile.rms)
    assert check.verdict("forward").finding == "bounded"
    assert check.verdict("norm drift").level == "ok"
    assert check.level != "fail"


@deep_or_often(deep=DEEPER)
@pytest.mark.parametrize("scheme", ["deepnorm", "spannorm"])
def test_gradients_are_kept_where_the_skip_is_strong(scheme, depths, seeds):
    check = report(scheme, depths, seeds)
    for when in ("before", "after"):
        assert all(0.1 < profile.G < 10.0 for profile in check.ladder.deepest(when))
    assert check.verdict("forward").finding == "bounded"
    assert check.verdict("backward").finding == "power law"
    assert check.verdict("unsteady").level == "ok"
    assert check.verdict("collapse").level == "ok"
    assert check.level != "fail"


@pytest.mark.parametrize("scheme", normlab.list_schemes())
def test_every_scheme_gets_a_whole_report(scheme):
    check = report(scheme, DEEP if scheme in SEEN_DEEP else SHALLOW, 1)
    assert check.ladder.depths == ((6, 12, 24, 48) if scheme in SEEN_DEEP else SHALLOW)
    assert check.theory is not None
    assert check.verdict("certificate").level != "fail"
    assert all(verdict.finding != "not measured" for verdict in check.verdicts if verdict.name != "norm drift")
    assert all(math.isfinite(verdict.value) for verdict in check.verdicts if verdict.value is not None)
    assert Check.from_json(check.to_json()) == check
