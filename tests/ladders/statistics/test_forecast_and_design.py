"""Forecasts of new cells, and what a design can show."""

from __future__ import annotations

import numpy as np
import pytest

from normlab.errors import NormLabError
from normlab.ladders.statistics import Design, Place, answer, expected_widths, forecast
from normlab.ladders.statistics.cells import cells_of
from normlab.ladders.statistics.design import extensions
from normlab.ladders.statistics.estimators.fit import sample_of
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

PATH = simulated_path()
TOP = as_places(PATH.cells)[-1:]


def _rows(cells: int, seed: int = 0) -> list:
    gaps, losses = simulate(PATH, TRUTHS[2], USUAL, 3, 1, np.random.default_rng(seed))
    rows = as_rows(PATH, gaps[0], losses[0])
    return [row for row in rows if row.size in PATH.sizes[:cells]]


def test_more_new_seeds_make_a_narrower_prediction() -> None:
    one, three = (forecast(_rows(4), baseline="pre", cells=TOP, seeds=seeds)[0] for seeds in (1, 3))
    assert one.gap.width > three.gap.width
    assert one.simple_law.width > three.simple_law.width
    assert one.gap.mean == pytest.approx(three.gap.mean)


def test_forecasts_of_several_budgets_hold_together() -> None:
    """A miss at one of them counts against the scheme: with three at 95 % each, one ladder in seven would miss."""
    places = [Place(**{**vars(TOP[0]), "tokens": TOP[0].tokens * times}) for times in (1, 2, 4)]
    (alone,) = forecast(_rows(4), baseline="pre", cells=TOP, seeds=3)
    first, *_ = together = forecast(_rows(4), baseline="pre", cells=places, seeds=3)
    assert alone.gap.level == pytest.approx(0.95)
    assert [own.gap.level for own in together] == pytest.approx([1.0 - 0.05 / 3] * 3)
    assert first.gap.width > 1.1 * alone.gap.width


def test_a_trained_cell_is_known_better_than_a_forecast_of_it() -> None:
    told = forecast(_rows(4), baseline="pre", cells=TOP, seeds=3)[0]
    trained = answer(_rows(5), baseline="pre").schemes[0].cells[-1].gap
    assert trained is not None
    assert trained.width < 0.4 * told.gap.width


def test_a_forecast_is_judged_when_all_its_seeds_have_ended() -> None:
    """The mean of fewer seeds scatters more than the forecast allows for."""
    (place,) = TOP
    named = [Place(**{**vars(place), "size": PATH.sizes[-1]})]
    told = forecast(_rows(4), baseline="pre", cells=named, seeds=3)
    for seeds in (1, 2, 3):
        rows = [row for row in _rows(5) if row.size != PATH.sizes[-1] or row.seed < seeds]
        (held_out,) = answer(rows, baseline="pre", held_out=told).schemes[0].held_out
        assert (held_out.measured is not None, held_out.is_hit is not None) == (seeds == 3, seeds == 3)


def test_forecasts_of_nothing() -> None:
    assert forecast(_rows(4), baseline="pre", cells=[], seeds=2) == []
    with pytest.raises(NormLabError, match="at least one seed"):
        forecast(_rows(4), baseline="pre", cells=TOP, seeds=0)


def _design(rungs: int, seeds: int) -> Design:
    ladder = simulated_path(rungs)
    places = zip(ladder.sizes, as_places(ladder.cells), strict=True)
    cells = [Place(**{**vars(place), "size": size}) for size, place in places]
    return Design(cells=cells, seeds=seeds, is_branched=False)


def test_expected_widths_grow_with_distance_and_shrink_with_seeds_at_the_top() -> None:
    few, many = expected_widths(_design(5, 3)), expected_widths(_design(5, 12))
    widths = [own.width for own in few]
    assert widths == sorted(widths)
    assert [own.place.name for own in few[1:]] == ["3.5 × the top", "10 × the top"]
    assert many[0].width < few[0].width


def test_an_expected_width_is_that_of_a_straight_ladder() -> None:
    """Against the mean width of answers to simulated ladders without a gap."""
    widths = []
    for seed in range(12):
        gaps, losses = simulate(PATH, TRUTHS[0], USUAL, 3, 1, np.random.default_rng(seed))
        own = answer(as_rows(PATH, gaps[0], losses[0]), baseline="pre").schemes[0].cells[-1].gap
        assert own is not None
        widths.append(own.width)
    assert expected_widths(_design(5, 3))[0].width == pytest.approx(np.mean(widths), rel=0.15)


def test_one_more_rung_buys_more_than_seeds_beyond_the_top() -> None:
    own = answer(_rows(5), baseline="pre").schemes[0]
    seeds, rung = own.what_more
    assert rung.width_then < 0.7 * rung.width_now
    assert rung.width_then < seeds.width_then


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ladder", [PATH, simulated_grid(3, 3), simulated_line("size")], ids=lambda own: own.name)
def test_more_runs_never_widen(ladder: SimulatedLadder, seed: int) -> None:
    """With means held fixed, more seeds made a bend of the noise more credible, and the interval wider."""
    gaps, losses = simulate(ladder, TRUTHS[seed], USUAL, 3, 1, np.random.default_rng(seed))
    for more in answer(as_rows(ladder, gaps[0], losses[0]), baseline="pre").schemes[0].what_more:
        assert more.width_then <= more.width_now


def test_the_expected_width_is_that_of_ladders_with_more_runs() -> None:
    """One more rung: expected from four rungs, against the widths of answers to the same ladders with five."""
    expected, came = [], []
    for seed in range(12):
        gaps, losses = simulate(PATH, TRUTHS[1], USUAL, 3, 1, np.random.default_rng(seed))
        rows = as_rows(PATH, gaps[0], losses[0])
        place = as_places(PATH.beyond["3.5x"])[0]
        four, five = (
            answer([row for row in rows if row.size in PATH.sizes[:rungs]], baseline="pre", targets=[place]).schemes[0]
            for rungs in (4, 5)
        )
        (rung,) = [more for more in four.what_more if "rung" in more.what]
        expected.append(rung.width_then)
        came.append(five.projections[-1].gap.width)
    # The further rung shows how much the gap bends, which the expectation leaves open: it promises less than comes.
    assert 1.0 < np.mean(expected) / np.mean(came) < 1.4


@pytest.mark.parametrize(("size", "tokens"), [(1.5, 1.3), (1.0, 8.0), (20.0, 1.0), (0.5, 0.5)])
def test_no_further_cell_lies_beyond_the_target(size: float, tokens: float) -> None:
    ladder = simulated_grid(3, 3)
    gaps, losses = simulate(ladder, TRUTHS[0], USUAL, 3, 1, np.random.default_rng(0))
    cells = cells_of(as_rows(ladder, gaps[0], losses[0]), "peri", "pre")
    top = cells[-1].place
    target = Place(
        name="target", size="", parameters=round(top.parameters * size), tokens=round(top.tokens * tokens),
        flops=top.flops * size * tokens,
    )  # fmt: skip
    found = extensions(sample_of(cells), [cell.place for cell in cells], target)
    assert ["more size" in what for what, _ in found] == [True] * (size > 1.1) + [False] * (tokens > 1.1)
    for _, more in found:
        assert all(cell.place.parameters <= max(size, 1.0) * top.parameters for cell in more)
        assert all(cell.place.tokens <= max(tokens, 1.0) * top.tokens for cell in more)
    steps = [
        max(cell.place.parameters for cell in more) / top.parameters for what, more in found if "more size" in what
    ]
    # By the ladder's own last step, 42.5M over 23.2M, if the target allows it.
    assert steps == pytest.approx([min(42.5 / 23.2, size)] * (size > 1.1))


def test_seeds_that_would_show_an_open_sign_at_the_top() -> None:
    def found(gap: float) -> tuple[bool, int | None]:
        spread = np.array([-0.008, 0.0, 0.008])
        losses = np.tile(baseline_loss(PATH.cells.parameters, PATH.cells.tokens)[:, None], 3)
        own = answer(as_rows(PATH, gap + np.tile(spread, (5, 1)), losses), baseline="pre").schemes[0]
        assert own.cells[-1].gap is not None
        return own.cells[-1].gap.spans_zero, own.seeds_for_sign

    assert found(-0.05) == (False, None)
    is_open, few = found(-0.008)
    further, more = found(-0.006)
    assert is_open
    assert further
    assert few is not None
    assert more is not None
    assert 1 <= few < more
    # What a rung does to a scheme alone is no smaller with more seeds.
    assert found(-0.001) == (True, None)


def test_a_design_needs_cells() -> None:
    with pytest.raises(NormLabError, match="at least one cell"):
        expected_widths(Design(cells=[], seeds=3))
