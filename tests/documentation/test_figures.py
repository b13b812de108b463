"""Figures of the README are readable on a telephone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "docs/figures"
TELEPHONE = 400.0
"""Pixels of its width."""
SMALLEST = 10.0
"""Pixels of type that are read without zooming."""


@pytest.mark.parametrize("name", ["growth", "budgets"])
def test_type_is_large_enough_on_a_telephone(name: str) -> None:
    drawn = (FIGURES / f"{name}.svg").read_text()
    box = re.search(r'viewBox="0 0 ([\d.]+) ', drawn)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", drawn)]
    assert box
    assert sizes
    assert min(sizes) * TELEPHONE / float(box[1]) >= SMALLEST
