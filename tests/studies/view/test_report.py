"""The page of claims: its strips, where the interval and the claimed range lie, and its words for sizes and budgets."""

from __future__ import annotations

import pytest

from normlab.studies.finding import Finding
from normlab.studies.view.claim_lines import _sizes
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


def test_sizes_with_the_same_budgets_are_named_together():
    shapes = [(4, 256, 118e6), (4, 256, 29.5e6), (6, 384, 29.5e6), (6, 384, 118e6), (12, 768, 59e6)]
    rows = [{"config": {"model": {"depth": depth, "dim": dim}, "tokens": int(n)}} for depth, dim, n in shapes]
    assert _sizes([*rows, *rows, {}]) == ["4×256, 6×384 for 29.5M, 118M tokens", "12×768 for 59M tokens"]
