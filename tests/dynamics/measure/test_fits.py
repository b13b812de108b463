"""Rates of curves whose rates are known, their intervals, and the tails that laws predict."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from normlab.dynamics.measure import fits, tails
from normlab.dynamics.system import laws
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, on_sphere

TIMES = np.geomspace(1.0, 100.0, 50)
CURVES = {
    "exponential": lambda a, t: np.exp(a * t),
    "stretched": lambda a, t: np.exp(a * np.sqrt(t + 1)),
    "power": lambda a, t: t**a,
}


@pytest.mark.parametrize("form", fits.FORMS)
@pytest.mark.parametrize("rate", [-2.0, -0.05, 1.0])
def test_an_exact_law_is_found_exactly(form, rate):
    values = 3.0 * CURVES[form](rate, TIMES)
    found = fits.fit_rate(TIMES, values, form)
    assert found.value == pytest.approx(rate, abs=1e-10)
    assert found.high - found.low < 1e-9
    assert found.at(7.0) == pytest.approx(3.0 * CURVES[form](rate, 7.0), rel=1e-9)
    assert fits.fit_best_form(TIMES, values).form == form


def test_the_interval_of_a_law_with_a_correction_holds_its_limit():
    """t^−2 (1 + 1/t): local exponents from −2.5 on; the interval must not exclude what the tail tends to by much."""
    times = np.geomspace(10.0, 1e4, 60)
    found = fits.fit_rate(times, times**-2.0 * (1 + 1 / times), "power")
    assert found.low < -2.0 < found.high
    assert found.high - found.low < 0.1


def test_several_orbits_give_the_interval_over_orbits():
    rates = [fits.fit_rate(TIMES, CURVES["power"](a, TIMES), "power") for a in (-1.9, -2.0, -2.1)]
    found = fits.pool_rates(rates)
    # Student's 95 % factor for three values is 4.3027.
    half = 4.302652729696142 * 0.1 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((-2.0, -2.0 - half, -2.0 + half), abs=1e-9)
    assert fits.pool_rates(rates[:1]) is rates[0]


def test_the_tail_ends_where_precision_does():
    values = [10.0**-k for k in range(30)] + [1e-20] * 5
    late = fits.tail_slice([float(k) for k in range(35)], values, floor=1e-25)
    assert late == slice(13, 25)
    assert fits.tail_slice([0.0, 1.0], [1.0, 0.5], floor=0.0) == slice(0, 0)


@pytest.mark.parametrize(
    ("times", "values", "says"),
    [([1.0] * 3, [1.0] * 3, "10 looks"), ([0.0, *TIMES], [1.0, *TIMES], "positive times"), (TIMES, -TIMES, "positive")],
)
def test_what_cannot_be_fitted_is_one_line(times, values, says):
    with pytest.raises(NormLabError, match=says):
        fits.fit_rate(times, values, "power")


@pytest.mark.parametrize(
    ("spec", "form", "rate", "growth"),
    [
        ("post", "exponential", -2.0, 0.0),
        ("pre", "power", -2.0, 1.0),
        ("mix", "power", -2.0, 1.0),
        ("peri", "power", -2.0, 1.0),
        ("peri(step=0.1)", "power", -2.0, 1.0),
        ("ngpt(alpha=1.0)", "exponential", -2.0, 0.0),
        ("ngpt(alpha=0.5)", "exponential", -1.0, 0.0),
        ("sqrt", "stretched", -4.0, 0.0),
        ("lns", "power", -1.0, 0.5),
        ("spannorm", "exponential", -1.0, 0.0),
        ("geonorm", "power", -2.0, 0.0),
        ("geonorm(decay=sqrt)", "stretched", -4.0, 0.0),
        ("geonorm(decay=none)", "exponential", -2.0, 0.0),
    ],
)
def test_tails_of_the_table_follow_from_the_laws(spec, form, rate, growth):
    found = tails.predict_tail(laws.find_law(spec, 24))
    assert found is not None
    assert (found.form, found.growth) == (form, pytest.approx(growth, abs=1e-3))
    assert found.rate == pytest.approx(rate, rel=1e-4)


def test_no_tail_where_theory_has_none():
    assert tails.predict_tail(laws.find_law("none", 24)) is None
    law = Law(speed=lambda m: (1 + m.time) ** 3, rms=on_sphere, forward="bounded", backward="")
    assert tails.predict_tail(law) is None
    assert tails.predict_tail(Law(speed=None, rms=on_sphere, forward="bounded", backward="")) is None
    stops = Law(speed=lambda m: torch.full_like(m.time, math.inf), rms=on_sphere, forward="bounded", backward="")
    assert tails.predict_tail(stops) is None


def test_several_trajectories_are_fitted_in_the_form_of_most():
    """One seed whose tail looks like a power does not decide, whichever comes first."""
    odd, plain = [time**-2.0 for time in TIMES], [[math.exp(-a * time) for time in TIMES] for a in (0.1, 0.2, 0.3)]
    for values in ([odd, *plain], [*plain, odd]):
        rates = fits.fit_best_common_form([(TIMES, each) for each in values])
        assert [rate.form for rate in rates] == ["exponential"] * 4
