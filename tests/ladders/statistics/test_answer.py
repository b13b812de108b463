"""answer() from rows: known laws, order of rows, JSON, and rows that cannot be used."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from normlab.errors import NormLabError
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import EdgeRate, LadderAnswer, Place, answer, forecast
from normlab.ladders.statistics.answer import Interval, SchemeAnswer
from normlab.ladders.statistics.estimators.layout import Side
from normlab.ladders.statistics.simulated.calibration import as_places
from normlab.ladders.statistics.simulated.ladders import (
    USUAL,
    SimulatedLadder,
    as_rows,
    simulate,
    simulated_grid,
    simulated_line,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import TRUTHS, baseline_loss
from normlab.ladders.statistics.trend import verdict_of

BY_NAME = {truth.name: truth for truth in TRUTHS}
TARGET = Place(
    name="16x1024 with 400M tokens", size="16x1024", parameters=236_000_000, tokens=400_000_000, flops=1.52e9 * 400e6
)

SMALL = (
    simulated_path(1), simulated_path(2), simulated_path(3), simulated_grid(1, 3), simulated_grid(3, 1),
    simulated_grid(2, 2),
)  # fmt: skip


def _rows(ladder: SimulatedLadder, truth: str, seed: int = 0, seeds: int = 3, scheme: str = "peri") -> list[LadderRow]:
    gaps, losses = simulate(ladder, BY_NAME[truth], USUAL, seeds, 1, np.random.default_rng(seed))
    return as_rows(ladder, gaps[0], losses[0], scheme)


def _exact_rows(ladder: SimulatedLadder, truth: str) -> list[LadderRow]:
    gap = np.tile(BY_NAME[truth].gap(ladder.cells)[:, None], 3)
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    return as_rows(ladder, gap, loss)


def _only(found: LadderAnswer) -> SchemeAnswer:
    assert len(found.schemes) == 1
    return found.schemes[0]


@pytest.mark.parametrize("ladder", [simulated_path(), simulated_grid()], ids=["path", "grid"])
def test_a_constant_multiplier_is_found_from_exact_losses(ladder: SimulatedLadder) -> None:
    own = _only(answer(_exact_rows(ladder, "constant multiplier 1.1"), baseline="pre"))
    for cell in own.cells:
        assert cell.multiplier is not None
        # exp(-gap/s) is exact for small ln k; its second-order term is α·(ln k)²/2 < 0.002. The fit smooths a little.
        assert cell.multiplier.mean == pytest.approx(1.1, abs=0.01)
    assert own.trend.verdict == "shrinks"
    drift = own.trend.compute and own.trend.compute.log_multiplier_change
    assert drift is not None
    assert drift.spans_zero
    beyond = own.projections[1]
    assert beyond.constant_multiplier is not None
    truth = float(BY_NAME["constant multiplier 1.1"].gap(ladder.beyond["10x"])[0])
    assert beyond.constant_multiplier.mean == pytest.approx(truth, abs=0.003)


def test_the_baseline_law_finds_slopes_and_a_range_of_e() -> None:
    law = answer(_exact_rows(simulated_path(), "none"), baseline="pre").baseline_law
    assert law is not None
    assert law.irreducible is not None
    # One power is fitted to a law with two, so that E is slightly off.
    assert law.irreducible.mean == pytest.approx(2.1, abs=0.03)
    assert law.residual_sd < 0.002
    for cell in law.cells:
        slope = 0.15 * 0.9 * (cell.parameters / 110e6) ** -0.30 + 0.175 * 1.18 * (cell.tokens / 33e6) ** -0.35
        assert cell.slope.mean == pytest.approx(slope, rel=0.01)


def test_e_lies_between_zero_and_the_smallest_loss() -> None:
    """Three cells leave E open on both sides: what cannot be is not part of its range."""
    rows = _rows(simulated_path(3), "none", seeds=1)
    law = answer(rows, baseline="pre").baseline_law
    assert law is not None
    assert law.irreducible is not None
    smallest = min(cell.loss for cell in law.cells)
    assert 0.0 < law.irreducible.low < law.irreducible.mean < law.irreducible.high < smallest
    # 95 % of what is left between zero and the smallest loss cannot be all of it.
    assert law.irreducible.width < 0.975 * smallest


def test_e_is_not_identified_where_the_law_leaves_no_room() -> None:
    """Losses that fall ever faster put all of E below zero."""
    rows = _exact_rows(simulated_path(), "none")
    lowest = min(row.flops for row in rows)
    fallen = [replace(row, loss=4.0 - 0.05 * np.log(row.flops / lowest) ** 2) for row in rows]
    found = answer(fallen, baseline="pre")
    assert found.baseline_law is not None
    assert found.baseline_law.irreducible is None
    assert LadderAnswer.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("truth", "verdict"),
    [("shrinks", "shrinks"), ("grows and settles", "crosses"), ("late onset", "grows"), ("bump", "not shown")],
)
def test_trends_within_a_path(truth: str, verdict: str) -> None:
    """From exact losses. A bump ends where it began, but is not constant."""
    assert _only(answer(_exact_rows(simulated_path(), truth), baseline="pre")).trend.verdict == verdict


@pytest.mark.parametrize("truth", ["bump", "none", "shrinks"])
def test_a_gap_that_comes_back_is_not_said_to_stay(truth: str) -> None:
    """From exact losses. Of a bump neither a verdict nor a change was shown, and so "whether it moves is not shown"."""
    own = _only(answer(_exact_rows(simulated_path(), truth), baseline="pre"))
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
        test = _only(answer(as_rows(ladder, gap, loss), baseline="pre")).trend.compute
        turns += test is not None and test.turn is not None
    assert turns <= 4


def test_a_gap_that_lives_in_tokens_moves_along_tokens_only() -> None:
    own = _only(answer(_rows(simulated_grid(), "fades in tokens only"), baseline="pre"))
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
    cells = dict(zip(((row.size, row.tokens) for row in _exact_rows(ladder, "none")[::6]), off, strict=True))
    assert len(cells) == 3 * sizes
    exact = _exact_rows(ladder, "fades in tokens only")
    rounded = [replace(row, flops=row.flops * (1.0 + cells[row.size, row.tokens])) for row in exact]
    found = [answer(rows, baseline="pre") for rows in (exact, rounded)]
    assert [own.kind for own in found] == ["grid", "grid"]
    said = [[own.text for own in _only(own).identified.reasons if own.rule == "small ladder"] for own in found]
    assert [any("2 sizes and 3 budgets" in text for text in texts) for texts in said] == [sizes == 2] * 2
    first, second = ({cell.cell: cell.gap and cell.gap.mean for cell in _only(own).cells} for own in found)
    # A place moves by 2 % of an e-fold, and a gap by the prior's 0.06 nats an e-fold; twice, for the cells around it.
    assert second == pytest.approx(first, abs=2 * 0.06 * 0.02)


def test_forms_that_disagree_are_told_apart() -> None:
    """Two forms of one name differ in their exponent, and neither fits best: they are only not rejected."""
    ladder = simulated_grid()
    gap = 0.05 - 0.06 * np.exp(-0.2 * ladder.cells.x)
    noise = np.random.default_rng(0).normal(0.0, 0.0015, (12, 3))
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    rows = as_rows(ladder, gap[:, None] + noise, loss)
    found = [own for own in _only(answer(rows, baseline="pre")).identified.reasons if own.rule == "forms disagree"]
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
        trends.append(_only(answer(rows, baseline="pre")).trend)
    assert sum(own.verdict in ("shrinks", "grows") for own in trends) <= 5
    turned = [own.compute for own in trends if own.verdict == "not shown" and own.compute.direction is not None]
    assert turned
    assert {own.direction for own in turned} == {"worse"}


def test_the_order_of_rows_does_not_matter() -> None:
    rows = _rows(simulated_path(), "shrinks") + [
        row for row in _rows(simulated_path(), "late onset", 1, scheme="keel") if row.scheme == "keel"
    ]
    first = answer(rows, baseline="pre")
    random.Random(0).shuffle(rows)
    second = answer(rows, baseline="pre")
    by_scheme = [sorted(own.schemes, key=lambda scheme: scheme.scheme) for own in (first, second)]
    assert by_scheme[0] == by_scheme[1]
    assert first.baseline_law == second.baseline_law


def test_json_round_trip() -> None:
    rows = _rows(simulated_path(), "shrinks")
    places = [_only(answer(rows, baseline="pre")).projections[0].place]
    held_out = forecast(rows, baseline="pre", cells=places, seeds=2)
    found = answer(rows, baseline="pre", targets=[TARGET], held_out=held_out)
    assert LadderAnswer.from_json(found.to_json()) == found
    assert found.to_dict()["schemes"][0]["projections"][-1]["place"]["name"] == TARGET.name


def test_answers_stored_before_reasons_had_names_are_read() -> None:
    found = answer(_rows(simulated_path(3), "shrinks"), baseline="pre")
    stored = found.to_dict()
    reasons = stored["schemes"][0]["identified"]["reasons"]
    letters = {"wide interval": "a", "forms disagree": "b", "small ladder": "d"}
    for reason in reasons:
        reason["rule"] = letters[reason["rule"]]
    assert "d" in [reason["rule"] for reason in reasons]
    assert LadderAnswer.from_dict(stored) == found


def test_schemes_share_the_level() -> None:
    rows = _rows(simulated_path(), "none")
    more = [replace(row, scheme="keel") for row in rows if row.scheme == "peri"]
    alone, both = answer(rows, baseline="pre"), answer([*rows, *more], baseline="pre")
    assert (alone.level_each, both.level_each) == (0.95, pytest.approx(0.975))
    narrow, wide = (found.schemes[0].cells[0].gap for found in (alone, both))
    assert narrow is not None
    assert wide is not None
    assert wide.width > narrow.width


def test_a_bad_run_takes_its_cell_out_by_name() -> None:
    rows = _rows(simulated_path(), "shrinks")
    spoilt = [
        replace(row, state="diverged", loss=None) if (row.scheme, row.size, row.seed) == ("peri", "110M", 1) else row
        for row in rows
    ]
    found = answer(spoilt, baseline="pre")
    top = _only(found).cells[-1]
    assert not top.is_usable
    assert top.reason == "unreliable: seed 1 of peri diverged"
    assert any("seed 1 of peri diverged" in text for text in found.cautions)
    without = answer([row for row in rows if row.size != "110M"], baseline="pre")
    assert _only(found).projections[0].simple_law == _only(without).projections[0].simple_law


@pytest.mark.parametrize("cells", [1, 5])
def test_a_gap_outside_the_priors_leaves_each_cell_to_its_own_seeds(cells: int) -> None:
    """None is dropped by its outcome: with one cell so far off, or all, each is judged and none fitted."""
    far = simulated_path().sizes[:cells]
    rows = [
        replace(row, loss=(row.loss or 0.0) - 0.5 * (row.scheme == "peri" and row.size in far))
        for row in _rows(simulated_path(), "none")
    ]
    own = _only(answer(rows, baseline="pre"))
    for cell in own.cells:
        values = np.array(list(cell.differences.values()))
        # Student's t for two degrees of freedom: 4.303.
        half = 4.302653 * values.std(ddof=1) / np.sqrt(3)
        assert cell.is_usable
        assert (cell.gap, cell.multiplier) == (None, None)
        assert cell.student is not None
        assert (cell.student.low, cell.student.high) == pytest.approx(
            (values.mean() - half, values.mean() + half), rel=1e-5
        )
    assert own.trend.compute is None
    assert own.projections == []
    assert [reason.rule for reason in own.identified.reasons] == ["gap too large"]
    assert f"better at {cells} of 5 cells, each by its own seeds alone" in own.sentence
    assert "too large for the assumptions of a trend or a forecast" in own.sentence
    places = as_places(simulated_path().beyond["3.5x"])
    assert forecast(rows, baseline="pre", cells=places, seeds=2) == []


def test_a_result_far_outside_its_forecast_is_a_miss() -> None:
    """A gap of 0.5 nats was called unreliable, and the forecast not judged."""
    rows = _rows(simulated_path(), "shrinks")
    top = next(row for row in rows if row.size == "110M")
    place = Place(name="110M", size=top.size, parameters=top.parameters, tokens=top.tokens, flops=top.flops)
    stored = forecast([row for row in rows if row.size != "110M"], baseline="pre", cells=[place], seeds=3)
    off = [replace(row, loss=(row.loss or 0.0) + 0.5 * (row.scheme == "peri" and row.size == "110M")) for row in rows]
    (entry,) = _only(answer(off, baseline="pre", held_out=stored)).held_out
    assert entry.is_hit is False


def test_one_run_listed_as_several_seeds_is_a_caution() -> None:
    """At three of five cells all seeds have the losses of the first one; at two, they may by chance of rounding."""
    rows = _rows(simulated_path(), "shrinks")
    first = {(row.scheme, row.cell): row.loss for row in rows if row.seed == 0}
    sizes = list(dict.fromkeys(row.size for row in rows))

    def told(repeated: int) -> list[str]:
        same = [replace(row, loss=first[row.scheme, row.cell]) if row.size in sizes[:repeated] else row for row in rows]
        return [line for line in answer(same, baseline="pre").cautions if "same gap" in line]

    assert told(0) == told(2) == []
    assert told(3) == [
        "All seeds of peri have the same gap at 3 of 5 cells: if one run is listed as several seeds, the intervals are "
        "too narrow."
    ]


def test_seeds_without_a_partner_are_not_pairs() -> None:
    rows = [row for row in _rows(simulated_path(), "none") if not (row.scheme == "pre" and row.seed == 2)]
    own = _only(answer(rows, baseline="pre"))
    assert [cell.n for cell in own.cells] == [2] * 5
    rows = [row for row in rows if (row.scheme == "pre") == (row.seed == 0)]
    assert {cell.reason for cell in _only(answer(rows, baseline="pre")).cells} == {
        "no seed in both the scheme and the baseline"
    }


def test_one_seed_is_answered_with_assumed_noise() -> None:
    found = answer(_rows(simulated_path(), "shrinks", seeds=1), baseline="pre")
    cell = _only(found).cells[-1]
    assert cell.student is None
    assert cell.gap is not None
    assert any("one seed at every cell" in text for text in found.cautions)


def test_a_scheme_on_the_smaller_sizes_has_its_own_top() -> None:
    rows = [row for row in _rows(simulated_path(), "shrinks") if row.scheme == "pre" or row.size != "110M"]
    own = _only(answer(rows, baseline="pre"))
    assert own.top is not None
    assert own.top.size == "58.8M"
    assert own.projections[0].times_top == pytest.approx(3.5)


@pytest.mark.parametrize("ladder", SMALL, ids=lambda own: f"{own.name}-{len(own.group)}")
def test_small_ladders_are_answered_with_reasons(ladder: SimulatedLadder) -> None:
    own = _only(answer(_rows(ladder, "shrinks"), baseline="pre", targets=[TARGET]))
    assert not own.identified.is_identified
    assert "small ladder" in [reason.rule for reason in own.identified.reasons]
    assert "not identified" in own.sentence


def test_one_rung_is_not_one_rungs() -> None:
    rows = _rows(simulated_path(), "none")
    own = _only(answer([row for row in rows if row.size == rows[0].size], baseline="pre"))
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
    own = _only(answer(rows, baseline="pre", targets=targets))
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
    own = _only(answer(_line_rows(side, -0.10, 0.12), baseline="pre"))
    for projection, times in zip(own.projections, (3.5, 10.0), strict=True):
        expected = (1.0, times) if side == "size" else (times, 1.0)
        assert projection.place.parameters / 110e6 == pytest.approx(expected[0], rel=1e-6)
        assert projection.place.tokens / 440e6 == pytest.approx(expected[1], rel=1e-6)
        assert projection.place.name == f"{times:g} × the top in {'tokens' if side == 'size' else 'size'}"
        assert projection.gap.low < -0.10 < projection.gap.high


def test_a_path_goes_on_with_its_tokens_per_parameter() -> None:
    own = _only(answer(_rows(simulated_path(), "none"), baseline="pre"))
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
    own = _only(answer(rows, baseline="pre", targets=[far]))
    assert own.identified.against("far")[0].rule == "never varied"


def test_rules_e_f_and_a() -> None:
    rows = _rows(simulated_path(), "none")
    far = Place(name="8M with 9B tokens", size="", parameters=8_000_000, tokens=9_000_000_000, flops=4.3e17)
    edge = EdgeRate(scheme="pre", size="31.4M", lr=1.2e-3)
    reasons = _only(answer(rows, baseline="pre", targets=[far], edge_rates=[edge])).identified.reasons
    assert {"wide interval", "other tokens per parameter", "rate at edge"} <= {reason.rule for reason in reasons}
    assert reasons[-1].text == "the rate 0.0012 that pre picked at 31.4M is at the edge of those tried"


def test_ten_times_the_top_is_judged_beside_nearer_targets() -> None:
    """Where 4 x the top is refused for the width of its interval, the wider one at 10 x is no answer either."""
    rows = _rows(simulated_path(), "none")
    top = max(rows, key=lambda row: row.flops)
    near = Place(name="near", size="", parameters=2 * top.parameters, tokens=2 * top.tokens, flops=4.0 * top.flops)
    own = _only(answer(rows, baseline="pre", targets=[near]))
    assert "wide interval" in {reason.rule for reason in own.identified.against("near")}
    assert "wide interval" in {reason.rule for reason in own.identified.against("10 × the top")}
    assert not own.identified.is_identified
    alone = _only(answer(rows, baseline="pre"))
    assert alone.identified.against("10 × the top") == own.identified.against("10 × the top")


def test_a_forecast_is_hit_or_missed() -> None:
    rows = _rows(simulated_path(), "shrinks")
    below = [row for row in rows if row.size != "110M"]
    top = next(row for row in rows if row.size == "110M")
    place = Place(name="110M", size=top.size, parameters=top.parameters, tokens=top.tokens, flops=top.flops)
    stored = forecast(below, baseline="pre", cells=[place], seeds=3)
    hit = _only(answer(rows, baseline="pre", held_out=stored))
    assert hit.held_out[0].is_hit
    off = [
        replace(row, loss=(row.loss or 0.0) + 0.15) if row.scheme == "peri" and row.size == "110M" else row
        for row in rows
    ]
    missed = _only(answer(off, baseline="pre", held_out=stored))
    assert missed.held_out[0].is_hit is False
    assert "missed forecast" in [reason.rule for reason in missed.identified.reasons]
    pending = _only(answer(below, baseline="pre", held_out=stored))
    assert pending.held_out[0].measured is None
    assert pending.held_out[0].is_hit is None


def test_few_steps_are_marked_and_refitted_without() -> None:
    rows = [replace(row, steps=1000 if row.parameters < 2e7 else 7200) for row in _rows(simulated_path(), "shrinks")]
    found = answer(rows, baseline="pre")
    assert [cell.few_steps for cell in _only(found).cells] == [True, True, False, False, False]
    assert any("2 of 5 cells have fewer than 3,000 steps; without them" in text for text in found.cautions)


def test_speed_counts_from_100m_parameters_on() -> None:
    speed = {"pre": 100.0, "peri": 98.0}
    rows = [replace(row, tokens_per_s=speed[row.scheme]) for row in _rows(simulated_path(), "shrinks")]
    cells = _only(answer(rows, baseline="pre")).cells
    assert all(cell.multiplier_in_time is None for cell in cells[:-1])
    assert cells[-1].multiplier is not None
    assert cells[-1].multiplier_in_time is not None
    assert cells[-1].multiplier_in_time.high == pytest.approx(0.98 * cells[-1].multiplier.high)


def test_a_scheme_pays_for_its_own_flops() -> None:
    """A multiplier of 1.1 at three times the FLOPs a token is one of 1.1/3; the one in time has its own ratio."""
    speed = {"pre": 100.0, "peri": 98.0}
    rows = [replace(row, tokens_per_s=speed[row.scheme]) for row in _rows(simulated_path(), "constant multiplier 1.1")]
    cost = {"110M": 3.0}
    dear = [replace(row, flops=row.flops * cost.get(row.size, 2.0)) if row.scheme == "peri" else row for row in rows]
    found = answer(dear, baseline="pre")
    assert any("peri takes 2 to 3 times the baseline's FLOPs for the same tokens" in line for line in found.cautions)
    equal, own = _only(answer(rows, baseline="pre")), _only(found)
    for before, after in zip(equal.cells, own.cells, strict=True):
        assert before.multiplier is not None
        assert after.multiplier is not None
        assert after.multiplier.mean == pytest.approx(before.multiplier.mean / cost.get(after.size, 2.0))
        assert (after.flops, after.gap, after.multiplier_in_time) == (
            before.flops,
            before.gap,
            before.multiplier_in_time,
        )
    assert own.projections[0].multiplier is not None
    assert equal.projections[0].multiplier is not None
    assert own.projections[0].multiplier.mean == pytest.approx(equal.projections[0].multiplier.mean / 3.0)
    before, after = (each.trend.compute and each.trend.compute.log_multiplier_change for each in (equal, own))
    assert before is not None
    assert after is not None
    assert after.mean == pytest.approx(before.mean + np.log(2.0 / 3.0))


def test_wrong_rows_are_refused_in_one_line() -> None:
    rows = _rows(simulated_path(), "none")
    with pytest.raises(NormLabError, match="no rows"):
        answer([], baseline="pre")
    with pytest.raises(NormLabError, match="unknown baseline 'post'"):
        answer(rows, baseline="post")
    with pytest.raises(NormLabError, match="listed twice"):
        answer([*rows, rows[0]], baseline="pre")
    with pytest.raises(NormLabError, match="between 0 and 1"):
        answer(rows, baseline="pre", level=95.0)


def test_only_a_baseline_is_an_answer_without_schemes() -> None:
    found = answer([row for row in _rows(simulated_path(), "none") if row.scheme == "pre"], baseline="pre")
    assert found.schemes == []
    assert found.baseline_law is not None


def test_probability_that_the_gap_is_smaller_agrees_with_samples() -> None:
    """P(|there| < |top|) by the smooth estimator, for one seeded ladder, against draws from the joint posterior."""
    from normlab.ladders.statistics.cells import cells_of
    from normlab.ladders.statistics.estimators.fit import estimate, sample_of

    rows = _rows(simulated_path(), "shrinks")
    own = _only(answer(rows, baseline="pre"))
    sample = sample_of(cells_of(rows, "peri", "pre"))
    pair = [own.projections[0].place, sample.places[-1]]
    there, top, both = estimate(sample, pair, np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    rng, n = np.random.default_rng(0), 200_000
    at = rng.choice(len(there.weights), size=n, p=there.weights / there.weights.sum())
    shared = (both.sds**2 - there.sds**2 - top.sds**2) / 2.0
    at_top = rng.normal(top.means[at], top.sds[at])
    middle = there.means[at] + shared[at] / top.sds[at] ** 2 * (at_top - top.means[at])
    spread = np.sqrt(np.maximum(there.sds[at] ** 2 - shared[at] ** 2 / top.sds[at] ** 2, 0.0))
    drawn = np.mean(np.abs(rng.normal(middle, spread)) < np.abs(at_top))
    assert own.projections[0].shrinks == pytest.approx(drawn, abs=5.0 * 0.5 / np.sqrt(n) + 2e-3)
