"""Exponents over seeds against closed forms, and every finding."""

from __future__ import annotations

import math

import pytest

from normlab import NormLabError
from normlab.checks.coordinates.exponents import judge, trend
from normlab.checks.coordinates.records import Point, Trend
from normlab.numerics.power_law import Fit, mean_fit, power_law

SIZES = (4, 8, 32)


def points(start=0.0, first=0.0, last=0.0, seeds=(0.0, 0.0, 0.0)) -> list[Point]:
    """Power laws with these exponents; those of the changes differ by `seeds`."""
    return [
        Point(size=n, seed=k, sizes=(2.0 * n**start, 1.0), changes=(3.0 * n ** (first + d), 5.0 * n ** (last + d)))
        for n in SIZES
        for k, d in enumerate(seeds)
    ]


def found(**exponents) -> Trend:
    return trend("m", points(**exponents), 0.25)


def test_exponents_of_exact_power_laws() -> None:
    made = found(start=0.5, first=-0.3, last=1.0)
    for fit, p in ((made.start, 0.5), (made.first, -0.3), (made.last, 1.0), (made.relative, 0.5)):
        assert fit is not None
        assert fit.exponent == pytest.approx(p, abs=1e-12)
        assert (fit.low, fit.high) == (pytest.approx(p, abs=1e-12), pytest.approx(p, abs=1e-12))
        assert fit.n == 3


def test_the_interval_over_seeds_is_students() -> None:
    fit = found(seeds=(-0.1, 0.0, 0.1)).first
    # Three seeds: standard deviation 0.1; the quantile of Student's t with two degrees of freedom is 4.30265.
    assert fit is not None
    assert fit.exponent == pytest.approx(0.0, abs=1e-12)
    assert fit.high == pytest.approx(4.302652729911275 * 0.1 / math.sqrt(3), rel=1e-9)
    assert fit.low == pytest.approx(-fit.high, rel=1e-9)


def test_the_mean_of_fits() -> None:
    fits = [power_law((2, 4), (1.0, 2.0)), power_law((2, 4), (1.0, 8.0))]
    both = mean_fit(fits)
    assert both.exponent == pytest.approx(2.0)
    assert both.at(2) == pytest.approx(1.0)
    assert (mean_fit(fits[:1]).low, mean_fit(fits[:1]).n) == (None, 1)
    with pytest.raises(NormLabError, match="at least one seed"):
        mean_fit([])


@pytest.mark.parametrize(
    ("exponents", "size", "change"),
    [
        ({}, "flat", "flat"),
        ({"first": 0.5}, "flat", "grows"),
        # Bounded later on, or earlier: the step at which it grows more counts.
        ({"first": 0.5, "last": -0.5}, "flat", "grows"),
        ({"first": -0.5, "last": 0.0}, "flat", "flat"),
        ({"first": -0.5, "last": -0.4}, "flat", "shrinks"),
        # Unit vectors: 1/√width throughout. A change that shrinks faster is not excused by that.
        ({"start": -0.5, "first": -0.5, "last": -0.5}, "shrinks", "as its size"),
        ({"start": -0.5, "first": -1.0, "last": -1.0}, "shrinks", "shrinks"),
        # Flat or shrinking like its size: fine either way. Without a size that shrinks it stays open.
        ({"start": -0.5, "first": -0.3, "last": -0.3, "seeds": (-0.05, 0.0, 0.05)}, "shrinks", "as its size"),
        ({"start": 0.0, "first": -0.3, "last": -0.3, "seeds": (-0.05, 0.0, 0.05)}, "flat", "unclear"),
        ({"start": 0.5, "first": 0.0, "last": 0.0}, "grows", "flat"),
        ({"first": 0.22, "last": 0.0, "seeds": (-0.01, 0.0, 0.01)}, "flat", "flat"),
        ({"first": 0.24, "last": 0.0, "seeds": (-0.1, 0.0, 0.1)}, "flat", "unclear"),
        ({"first": 0.5, "last": 0.0, "seeds": (-0.5, 0.0, 0.5)}, "flat", "unclear"),
    ],
)
def test_findings(exponents, size, change) -> None:
    made = found(**exponents)
    assert (made.size, made.change) == (size, change)
    assert made.breaks_rule == (change in ("grows", "shrinks") or size == "grows")


def test_what_cannot_be_fitted() -> None:
    still = [Point(size=n, seed=0, sizes=(1.0, 1.0), changes=(0.0,)) for n in SIZES]
    made = trend("frozen", still, 0.25)
    assert (made.first, made.last, made.relative, made.change) == (None, None, None, "constant")
    assert not made.breaks_rule
    broken = [Point(size=n, seed=0, sizes=(1.0, None), changes=(1.0, None if n == 32 else 1.0)) for n in SIZES]
    made = trend("broken", broken, 0.25)
    assert (made.last, made.change, made.breaks_rule) == (None, "not finite", True)
    # Zero in the first step, as behind an output projection that starts at zero: the last step is judged.
    late = [Point(size=n, seed=0, sizes=(0.0, 1.0), changes=(0.0, float(n))) for n in SIZES]
    made = trend("late", late, 0.25)
    assert (made.start, made.first, made.size, made.change) == (None, None, "constant", "grows")


def test_one_seed_counts_as_it_is() -> None:
    fit = Fit(exponent=0.3, intercept=0.0, low=None, high=None, n=1)
    assert [judge(fit, (), threshold) for threshold in (0.25, 0.35)] == ["grows", "flat"]
