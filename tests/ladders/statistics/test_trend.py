"""How a gap moves within a ladder: shrinks, grows, crosses, comes back, and along which axis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from normlab.ladders.statistics import answer
from normlab.ladders.statistics.answer import Interval
from normlab.ladders.statistics.simulated.ladders import (
    as_rows,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import baseline_loss
from normlab.ladders.statistics.trend import verdict_of
from tests.ladders.statistics.known_rows import exact_rows, noisy_rows, only


@pytest.mark.parametrize(
    ("truth", "verdict"),
    [("shrinks", "shrinks"), ("grows and settles", "crosses"), ("late onset", "grows"), ("bump", "not shown")],
)
def test_trends_within_a_path(truth: str, verdict: str) -> None:
    """From exact losses. A bump ends where it began, but is not constant."""
    assert only(answer(exact_rows(simulated_path(), truth), baseline="pre")).trend.verdict == verdict


@pytest.mark.parametrize("truth", ["bump", "none", "shrinks"])
def test_a_gap_that_comes_back_is_not_said_to_stay(truth: str) -> None:
    """From exact losses. Of a bump neither a verdict nor a change was shown, and so "whether it moves is not shown"."""
    own = only(answer(exact_rows(simulated_path(), truth), baseline="pre"))
    test = own.trend.compute
    assert test is not None
    assert (test.turn is not None) == (truth == "bump")
    if test.turn is not None and test.gap_turn is not None:
        lowest = min(own.cells, key=lambda cell: cell.differences["0"])
        assert test.turn.cell == lowest.cell
        assert test.gap_turn.high < min(test.gap_bottom.low, test.gap_top.low)
        assert f"the gap moves and comes back over the ladder ({test.gap_bottom.mean:+.3f} at " in own.sentence


def test_a_gap_of_noise_seldom_comes_back() -> None:
    """Each call errs in 5 of 100 at most, over all cells between the ends: of 20, more than 4 times in 3 of 1,000."""
    rng, ladder = np.random.default_rng(1), simulated_path()
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    turns = 0
    for _ in range(20):
        gap = rng.normal(0.0, 0.006, (len(ladder.cells.x), 3))
        test = only(answer(as_rows(ladder, gap, loss), baseline="pre")).trend.compute
        turns += test is not None and test.turn is not None
    assert turns <= 4


def test_a_gap_that_lives_in_tokens_moves_along_tokensonly() -> None:
    own = only(answer(noisy_rows(simulated_grid(), "fades in tokens only"), baseline="pre"))
    assert own.trend.tokens is not None
    assert own.trend.sizes is not None
    assert own.trend.tokens.verdict == "shrinks"
    assert own.trend.sizes.change.spans_zero
    assert own.axis_weights["tokens alone"] > 0.9


@pytest.mark.parametrize("sizes", [2, 4])
def test_rounded_flops_make_no_further_sizes(sizes: int) -> None:
    """FLOPs of a table may be rounded or measured: off by a different share in every cell, here of up to 2 %."""
    ladder = simulated_grid(sizes, 3)
    off = np.random.default_rng(0).uniform(-0.02, 0.02, len(ladder.group))
    cells = dict(zip(((row.size, row.tokens) for row in exact_rows(ladder, "none")[::6]), off, strict=True))
    assert len(cells) == 3 * sizes
    exact = exact_rows(ladder, "fades in tokens only")
    rounded = [replace(row, flops=row.flops * (1.0 + cells[row.size, row.tokens])) for row in exact]
    found = [answer(rows, baseline="pre") for rows in (exact, rounded)]
    assert [own.kind for own in found] == ["grid", "grid"]
    said = [[own.text for own in only(own).identified.reasons if own.rule == "small ladder"] for own in found]
    assert [any("2 sizes and 3 budgets" in text for text in texts) for texts in said] == [sizes == 2] * 2
    first, second = ({cell.cell: cell.gap and cell.gap.mean for cell in only(own).cells} for own in found)
    # A place moves by 2 % of an e-fold, and a gap by the prior's 0.06 nats an e-fold; twice, for the cells around it.
    assert second == pytest.approx(first, abs=2 * 0.06 * 0.02)


def test_forms_that_disagree_are_told_apart() -> None:
    """Two forms of one name differ in their exponent, and neither fits best: they are only not rejected."""
    ladder = simulated_grid()
    gap = 0.05 - 0.06 * np.exp(-0.2 * ladder.cells.x)
    noise = np.random.default_rng(0).normal(0.0, 0.0015, (12, 3))
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    rows = as_rows(ladder, gap[:, None] + noise, loss)
    found = [own for own in only(answer(rows, baseline="pre")).identified.reasons if own.rule == "forms disagree"]
    (said,) = [own.text for own in found]
    assert said.startswith("forms that the ladder does not reject disagree in sign at 10 × the top: ")
    first, second = said.partition(": ")[2].split(", ")
    assert first.rpartition(" ")[0] != second.rpartition(" ")[0]
    assert first.rpartition(" ")[2].startswith("-")
    assert second.rpartition(" ")[2].startswith("+")


def test_verdicts_need_what_they_claim() -> None:
    def interval(low: float, high: float) -> Interval:
        return Interval(low, high, (low + high) / 2.0, 0.95)

    def verdict(bottom: Interval, top: Interval, change: tuple[float, float], both: tuple[float, float]) -> str:
        return verdict_of(bottom, top, interval(*change), interval(*both), margin=0.02)

    minus, open_, plus = interval(-0.05, -0.03), interval(-0.01, 0.01), interval(0.02, 0.04)
    assert verdict(minus, plus, (0.05, 0.09), (-0.03, 0.01)) == "crosses"
    assert verdict(minus, open_, (0.02, 0.06), (-0.06, -0.02)) == "shrinks"
    assert verdict(open_, plus, (0.01, 0.05), (0.01, 0.05)) == "grows"
    assert verdict(open_, open_, (-0.015, 0.015), (-0.02, 0.02)) == "constant"
    assert verdict(open_, open_, (-0.025, 0.025), (-0.02, 0.02)) == "not shown"
    # A change that is shown between two gaps without a sign is neither shrinking nor growing, and the same if one of
    # them has a sign: the other may lie as far on the other side.
    ends = interval(-0.012, 0.001), interval(-0.001, 0.012)
    assert verdict(*ends, (0.001, 0.02), (-0.009, 0.009)) == "not shown"
    assert verdict(interval(-0.04, -0.01), interval(-0.002, 0.03), (0.01, 0.06), (-0.04, 0.01)) == "not shown"


def test_a_gap_that_changes_sign_at_equal_size_neither_shrinks_nor_grows() -> None:
    """From -0.01 to +0.01: 14 of these 40 ladders were called one or the other while one end's sign was enough.

    The sum of both ends is zero, and its interval misses that 5 times in 100: of 40, more than 5 times in fewer than 2
    of 100 experiments (binomial).
    """
    rng, ladder = np.random.default_rng(0), simulated_path()
    x, cells = ladder.cells.x, len(ladder.cells.x)
    gap = 0.02 * (x - x.min()) / (x.max() - x.min()) - 0.01
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    trends = []
    for _ in range(40):
        rows = as_rows(ladder, gap[:, None] + rng.normal(0.0, 0.006, (cells, 3)), loss)
        trends.append(only(answer(rows, baseline="pre")).trend)
    assert sum(own.verdict in ("shrinks", "grows") for own in trends) <= 5
    turned = [own.compute for own in trends if own.verdict == "not shown" and own.compute.direction is not None]
    assert turned
    assert {own.direction for own in turned} == {"worse"}
