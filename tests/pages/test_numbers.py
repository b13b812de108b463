"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from normlab.pages import numbers


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.fixed(4.16049), "4.1605"), (numbers.fixed(-0.05, 3), "−0.050"), (numbers.fixed(None), "–"),
        (numbers.fixed(math.nan), "–"), (numbers.fixed(True), "–"), (numbers.fixed("4"), "–"),
        (numbers.signed(0.05, 3), "+0.050"), (numbers.signed(-0.05, 3), "−0.050"), (numbers.signed(math.inf), "–"),
        (numbers.rate(6e-4), "6e-4"), (numbers.rate(1.25e-3), "1.25e-3"), (numbers.rate(0.01), "1e-2"),
        (numbers.rate(1), "1e0"), (numbers.rate(0.0), "0"), (numbers.rate(None), "–"),
        (numbers.format_count(0), "0"), (numbers.format_count(512), "512"), (numbers.format_count(999.7), "1k"),
        (numbers.format_count(33_554_432), "33.6M"), (numbers.format_count(1.2e9), "1.2B"),
        (numbers.format_count(None), "–"),
        (numbers.ratio(0.2682), "0.27"), (numbers.ratio(3.5), "3.5"), (numbers.ratio(99.4), "99"),
        (numbers.ratio(99.6), "100"), (numbers.ratio(2550.4), "2,550"),
        (numbers.memory(512), "512 B"), (numbers.memory(1.5 * 2**30), "1.5 GiB"),
        (numbers.memory(2**50), "1.02e+03 TiB"), (numbers.memory(None), "–"),
        (numbers.duration(0.25), "0.25 s"), (numbers.duration(59), "59 s"), (numbers.duration(600), "10 min"),
        (numbers.duration(7260), "2 h 01 min"), (numbers.duration(math.nan), "–"),
        (numbers.minus("gap -0.05 (-0.1 to +0.02), 1e-3, 4-6, x^-α"), "gap −0.05 (−0.1 to +0.02), 1e-3, 4-6, x^-α"),
        (numbers.join_names(["a"]), "a"), (numbers.join_names(["a", "b", "c"]), "a, b and c"),
    ],
)  # fmt: skip
def test_number_reads_as(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("spreads", "expected"), [([], 4), ([None, 0.0, math.inf], 4), ([0.05, 3.0], 3), ([0.0012], 4), ([1e-9], 6)]
)
def test_decimals_show_two_digits_of_the_smallest_spread(spreads: list[float | None], expected: int) -> None:
    assert numbers.decimals(spreads) == expected
