"""Nominal 95 % intervals of the smooth estimator cover 90 % and more for the worst of 24 truths, on path and grid."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from normlab.ladders.statistics.cells import cells_of
from normlab.ladders.statistics.estimators.fit import estimate, sample_of
from normlab.ladders.statistics.estimators.layout import Side
from normlab.ladders.statistics.estimators.noise import correlation_matrix
from normlab.ladders.statistics.simulated.calibration import (
    Case,
    as_places,
    measure,
    required_cases,
    within_priors,
    worst,
)
from normlab.ladders.statistics.simulated.ladders import (
    USUAL,
    as_rows,
    simulate,
    simulated_grid,
    simulated_line,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import FRESH_TRUTHS, TRUTHS, baseline_loss

REQUIRED = 0.90


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "repeats"),
    list(zip(required_cases(), (1000, 600, 400, 400), strict=True)),
    ids=["path", "grid", "plan-a", "plan-a-early-scatter"],
)
def test_smooth_intervals_cover_the_worst_truth(case: Case, repeats: int) -> None:
    found = worst(measure(case, [*TRUTHS, *FRESH_TRUTHS], repeats, "smooth"))
    for place, own in found.items():
        assert own.coverage >= REQUIRED, f"{place}: {own.truth} {own.coverage}"


@pytest.mark.full
@pytest.mark.parametrize("side", ["size", "tokens"])
def test_smooth_intervals_cover_where_only_tokens_or_only_sizes_vary(side: Side) -> None:
    """A gap in tokens alone moves twice as fast in compute as on a path: a late onset was covered 0.80 at 3.5 ×."""
    case = Case(name=f"one {side}", ladder=simulated_line(side))
    for place, own in worst(measure(case, within_priors(case, [*TRUTHS, *FRESH_TRUTHS]), 600, "smooth")).items():
        assert own.coverage >= REQUIRED, f"{place}: {own.truth} {own.coverage}"


@pytest.mark.full
def test_all_cells_of_a_grid_are_covered_together_less_often_than_each() -> None:
    """docs/guides/ladder.md: the intervals of twelve cells hold together about three times in four."""
    ladder, repeats = simulated_grid(), 60
    shares = []
    for truth in (TRUTHS[0], TRUTHS[2], TRUTHS[12]):
        gaps, losses = simulate(ladder, truth, USUAL, 3, repeats, np.random.default_rng(0))
        true, together = truth.gap(ladder.cells), 0
        for gap, loss in zip(gaps, losses, strict=True):
            cells = {cell.place.cell: cell for cell in cells_of(as_rows(ladder, gap, loss), "peri", "pre")}
            # In the order of the simulated cells, which is not that of compute.
            ordered = [cells[own.cell] for own in as_places(ladder.cells)]
            found = [own.interval(0.95) for own in estimate(sample_of(ordered), ordered)]
            together += all(own.low <= value <= own.high for own, value in zip(found, true, strict=True))
        shares.append(together / repeats)
    # Five standard errors of the mean of 180 draws.
    assert np.mean(shares) == pytest.approx(0.75, abs=5.0 * np.sqrt(0.75 * 0.25 / 180.0))


def test_simple_laws_cover_their_own_kind_and_miss_a_bump() -> None:
    case = Case(name="simple law", ladder=simulated_path())
    names = {truth.name: truth for truth in TRUTHS}
    chosen = [names["constant multiplier 1.1"], names["shrinks"], names["bump"]]
    found = {(own.truth, own.place): own.coverage for own in measure(case, chosen, 100, "simple_law")}
    assert found["constant multiplier 1.1", "10x"] > 0.9
    assert found["shrinks", "10x"] > 0.9
    assert found["bump", "10x"] < 0.2


def test_a_batch_is_the_same_as_one_answer() -> None:
    """Widths of the shared factorisation against `estimate`, up to the rounding of the noise to 6 %."""
    case = Case(name="one", ladder=simulated_path())
    (found,) = [own for own in measure(case, TRUTHS[2:3], 1, "smooth") if own.place == "3.5x"]
    rng = np.random.default_rng(zlib.crc32(f"{case.name}/{TRUTHS[2].name}".encode()))
    gaps, losses = simulate(case.ladder, TRUTHS[2], USUAL, 3, 1, rng)
    sample = sample_of(cells_of(as_rows(case.ladder, gaps[0], losses[0]), "peri", "pre"))
    expected = estimate(sample, as_places(case.ladder.beyond["3.5x"]))[0].interval(0.95).width
    assert found.width == pytest.approx(expected, rel=0.03)


def test_simulated_noise_has_the_moments_it_claims() -> None:
    ladder = simulated_grid()
    gaps, losses = simulate(ladder, TRUTHS[0], USUAL, 2, 40_000, np.random.default_rng(0))
    differences = gaps[..., 0] - gaps[..., 1]
    # Relative standard error of a variance from n draws: √(2/n).
    assert differences.var(axis=0).mean() == pytest.approx(2.0 * USUAL.paired_sd**2, rel=0.02)
    rungs = np.cov(gaps.mean(axis=-1).T) - np.cov(differences.T) / 4.0
    np.testing.assert_allclose(rungs, USUAL.own_rung**2 * correlation_matrix(ladder.group, 0.75), atol=1e-6)
    law = baseline_loss(ladder.cells.parameters, ladder.cells.tokens)
    np.testing.assert_allclose(losses.mean(axis=(0, 2)), law, atol=5.0 * 0.012 / np.sqrt(40_000))


def test_the_baseline_is_calibrated_to_what_was_measured() -> None:
    """4.173 with 33M and 3.791 with 100M tokens, 125M parameters."""
    found = baseline_loss(np.array([110e6, 110e6]), np.array([33e6, 100e6]))
    np.testing.assert_allclose(found, [4.173, 3.791], atol=0.02)


def test_truths_are_at_their_stated_values() -> None:
    """Gap at the bottom of five rungs, at the top, at 10 × and 100 ×."""
    ladder = simulated_path()
    stated = {
        "none": (0.0, 0.0, 0.0, 0.0),
        "constant multiplier 1.1": (-0.046, -0.021, -0.014, -0.010),
        "shrinks": (-0.116, -0.020, -0.009, -0.004),
        "multiplier falls, crosses": (-0.076, -0.011, 0.0, 0.005),
        "crosses and settles": (-0.096, 0.0, 0.011, 0.016),
        "grows and settles": (0.025, -0.022, -0.025, -0.025),
    }
    for truth in TRUTHS[:6]:
        found = [truth.gap(ladder.cells)[0], *(float(truth.gap(ladder.beyond[at])[0]) for at in ("1x", "10x", "100x"))]
        np.testing.assert_allclose(found, stated[truth.name], atol=0.0012, err_msg=truth.name)
