"""Gaps beyond a ladder: small ladders, sides that were never varied, and the reasons why a gap is not identified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import EdgeRate, Place, answer
from normlab.ladders.statistics.estimators.layout import Side
from normlab.ladders.statistics.simulated.ladders import (
    SimulatedLadder,
    as_rows,
    simulated_line,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import baseline_loss
from tests.ladders.statistics.known_rows import SMALL, TARGET, noisy_rows, only


@pytest.mark.parametrize("ladder", SMALL, ids=lambda own: f"{own.name}-{len(own.group)}")
def test_small_ladders_are_answered_with_reasons(ladder: SimulatedLadder) -> None:
    own = only(answer(noisy_rows(ladder, "shrinks"), baseline="pre", targets=[TARGET]))
    assert not own.identified.is_identified
    assert "small ladder" in [reason.rule for reason in own.identified.reasons]
    assert "not identified" in own.sentence


def test_one_rung_is_not_one_rungs() -> None:
    rows = noisy_rows(simulated_path(), "none")
    own = only(answer([row for row in rows if row.size == rows[0].size], baseline="pre"))
    assert "one rung, fewer than 4" in [reason.text for reason in own.identified.reasons]


def _line_rows(side: Side, gap: float, moves: float) -> list[LadderRow]:
    """Cells that have one `side` in common; the gap depends on that side alone."""
    ladder = simulated_line(side)
    along = ladder.cells.x_size if side == "size" else ladder.cells.x_tokens
    gaps = (gap + moves * along)[:, None] + np.random.default_rng(0).normal(0.0, 0.003, (5, 3))
    losses = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    return as_rows(ladder, gaps, losses)


@pytest.mark.parametrize("side", ["size", "tokens"])
def test_a_side_that_was_never_varied_is_an_obstacle(side: Side) -> None:
    """The gap moves by 0.12 nats an e-fold of what all cells have in common: no cell can show that."""
    rows = _line_rows(side, -0.10, 0.12)
    places = {"both": (330e6, 1320e6), "ahead": (110e6, 1320e6) if side == "size" else (330e6, 440e6)}
    targets = [
        Place(name=name, size="", parameters=round(n), tokens=round(d), flops=6.0 * n * d)
        for name, (n, d) in places.items()
    ]
    own = only(answer(rows, baseline="pre", targets=targets))
    assert own.identified.against("both")[0].rule == "never varied"
    assert own.identified.against("ahead") == []
    assert (
        "At both the gap is not identified: " + ("size" if side == "size" else "the number of tokens") in own.sentence
    )
    both, ahead = own.projections[2:]
    # An e-fold aside is worth the difference of two slopes of 0.06 each: 2 · 1.96 · 0.085 · ln 3 = 0.37 wide at least.
    assert both.gap.width > 0.35 > 3.0 * ahead.gap.width
    assert both.gap.low < -0.10 + 0.12 * np.log(3.0) < both.gap.high


@pytest.mark.parametrize("side", ["size", "tokens"])
def test_a_ladder_with_one_size_or_one_budget_is_projected_along_what_it_varies(side: Side) -> None:
    own = only(answer(_line_rows(side, -0.10, 0.12), baseline="pre"))
    for projection, times in zip(own.projections, (3.5, 10.0), strict=True):
        expected = (1.0, times) if side == "size" else (times, 1.0)
        assert projection.place.parameters / 110e6 == pytest.approx(expected[0], rel=1e-6)
        assert projection.place.tokens / 440e6 == pytest.approx(expected[1], rel=1e-6)
        assert projection.place.name == f"{times:g} × the top in {'tokens' if side == 'size' else 'size'}"
        assert projection.gap.low < -0.10 < projection.gap.high


def test_a_path_goes_on_with_its_tokens_per_parameter() -> None:
    own = only(answer(noisy_rows(simulated_path(), "none"), baseline="pre"))
    for projection in own.projections:
        assert projection.place.tokens_per_parameter == pytest.approx(4.0, rel=1e-6)
    assert "never varied" not in {reason.rule for reason in own.identified.reasons}


def test_sizes_a_few_per_cent_apart_are_one() -> None:
    """Parameters of a table that are off by 5 % do not vary size."""
    rows = [
        replace(row, parameters=row.parameters + (row.tokens % 7) * 800_000) for row in _line_rows("size", -0.1, 0.0)
    ]
    assert len({row.parameters for row in rows}) > 3
    far = Place(name="far", size="", parameters=330_000_000, tokens=440_000_000, flops=8.7e17)
    own = only(answer(rows, baseline="pre", targets=[far]))
    assert own.identified.against("far")[0].rule == "never varied"


def test_rules_e_f_and_a() -> None:
    rows = noisy_rows(simulated_path(), "none")
    far = Place(name="8M with 9B tokens", size="", parameters=8_000_000, tokens=9_000_000_000, flops=4.3e17)
    edge = EdgeRate(scheme="pre", size="31.4M", lr=1.2e-3)
    reasons = only(answer(rows, baseline="pre", targets=[far], edge_rates=[edge])).identified.reasons
    assert {"wide interval", "other tokens per parameter", "rate at edge"} <= {reason.rule for reason in reasons}
    assert reasons[-1].text == "the rate 0.0012 that pre picked at 31.4M is at the edge of those tried"


def test_ten_times_the_top_is_judged_beside_nearer_targets() -> None:
    """Where 4 x the top is refused for the width of its interval, the wider one at 10 x is no answer either."""
    rows = noisy_rows(simulated_path(), "none")
    top = max(rows, key=lambda row: row.flops)
    near = Place(name="near", size="", parameters=2 * top.parameters, tokens=2 * top.tokens, flops=4.0 * top.flops)
    own = only(answer(rows, baseline="pre", targets=[near]))
    assert "wide interval" in {reason.rule for reason in own.identified.against("near")}
    assert "wide interval" in {reason.rule for reason in own.identified.against("10 × the top")}
    assert not own.identified.is_identified
    alone = only(answer(rows, baseline="pre"))
    assert alone.identified.against("10 × the top") == own.identified.against("10 × the top")
