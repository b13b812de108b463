"""The strips of the page of claims: where the interval and the claimed range lie, and the ends of the strip."""

from __future__ import annotations

import pytest

from normlab.studies.finding import Finding
from normlab.studies.view.report import _bar


@pytest.mark.parametrize(
    ("value", "claimed", "ends"),
    [
        (3.6, (2.0, None), ("1.76", "3.84")),
        (5.2e20, (1000.0, None), ("2.2", "2.36e+23, logarithmic")),
        (0.5, (None, 9.0), ("0", "10.3")),
        (0.0, (None, 0.0), ("−0.15", "0.15")),
    ],
)
def test_a_strip_of_positive_numbers_does_not_begin_below_zero(value, claimed, ends):
    bar = _bar(Finding(verdict="reproduced", estimate=value, low=value, high=value, claimed=claimed))
    assert bar is not None
    assert bar["ends"] == ends
    left, width = bar["claimed"]
    assert 0.0 <= left < left + width <= 100.5
    assert 0.0 <= bar["estimate"] <= 100.0
