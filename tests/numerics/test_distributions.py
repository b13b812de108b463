"""Normal, chi-square and F distributions against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from normlab.errors import NormLabError
from normlab.numerics.distributions import chi_square_quantile, f_above, normal_cdf


def test_normal_cdf_is_scipys_to_the_error_of_linear_interpolation() -> None:
    z = np.linspace(-12.0, 12.0, 9_973)
    # h²/8 times the largest second derivative of Φ, with h = 1/512 and |φ'| ≤ 0.242.
    np.testing.assert_allclose(normal_cdf(z), stats.norm.cdf(z), atol=0.242 / 8.0 / 512**2 + 1e-15, rtol=0.0)


@pytest.mark.parametrize("df", [0.7, 1.0, 2.0, 5.6, 10.0, 24.0, 300.0])
@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_chi_square_quantile_is_scipys(probability: float, df: float) -> None:
    assert chi_square_quantile(probability, df) == pytest.approx(stats.chi2.ppf(probability, df), rel=1e-9)


@pytest.mark.parametrize(("above", "below"), [(1, 1), (2, 10), (3, 24), (10, 5.65)])
def test_f_tail_is_scipys(above: float, below: float) -> None:
    for value in (0.0, 0.3, 1.0, 4.0, 60.0):
        assert f_above(value, above, below) == pytest.approx(stats.f.sf(value, above, below), rel=1e-9)
    assert f_above(np.inf, above, below) == 0.0


def test_bad_probabilities_are_refused() -> None:
    with pytest.raises(NormLabError, match="between 0 and 1"):
        chi_square_quantile(1.0, 3.0)
