"""Smoothed losses: those of a parabola stay, a lucky run is pulled back, what is no parabola stays as it is."""

from __future__ import annotations

import math

import pytest

from normlab.ladders.rate_curve import smooth_losses

RATES = [1e-3, 1.41e-3, 2e-3, 2.83e-3, 4e-3]


def parabola(lr: float) -> float:
    return 4.0 + 0.1 * math.log2(lr / 2.2e-3) ** 2


def test_losses_on_a_parabola_stay():
    losses = {lr: parabola(lr) for lr in RATES}
    assert smooth_losses(losses) == {lr: pytest.approx(loss, abs=1e-12) for lr, loss in losses.items()}


def test_a_lucky_run_counts_for_less():
    """GeoNorm at 4×256: one run is 0.12 below its neighbours, where a parabola through all has 0.02."""
    losses = {5e-4: 4.5016, 1e-3: 4.2736, 1.41e-3: 4.1813, 2e-3: 4.1317, 2.83e-3: 4.0157, 4e-3: 4.1641}
    found = smooth_losses(losses)
    assert min(found, key=found.__getitem__) == 2.83e-3
    assert found[2e-3] - found[2.83e-3] == pytest.approx(0.016, abs=0.001)
    # Least squares: what is added in one place is taken away in others.
    near = [1.41e-3, 2e-3, 2.83e-3, 4e-3]
    assert sum(found[lr] for lr in near) == pytest.approx(sum(losses[lr] for lr in near), rel=1e-12)
    # Far from the best nothing changes.
    assert (found[5e-4], found[1e-3]) == (4.5016, 4.2736)


@pytest.mark.parametrize(
    "losses",
    [
        {},
        {1e-3: 4.0},
        {1e-3: 4.1, 2e-3: 4.0, 4e-3: 4.2},
        # Concave near the best: no parabola with a minimum.
        {1e-3: 4.0, 1.41e-3: 4.2, 2e-3: 4.2, 2.83e-3: 4.0001},
        # Four rates, but only three near the best.
        {2.5e-4: 4.9, 1e-3: 4.1, 2e-3: 4.0, 4e-3: 4.2},
    ],
)
def test_what_cannot_be_smoothed_stays(losses):
    assert smooth_losses(losses) == losses
