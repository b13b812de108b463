"""Figures of the README are readable on a telephone, and that of a ladder shows what its answer says."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from normlab.ladders.report import LadderReport
from tests.ladders.report import reports

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
TELEPHONE = 400.0
"""Pixels of its width."""
SMALLEST = 10.0
"""Pixels of type that are read without zooming."""


@pytest.mark.parametrize("name", ["growth", "budgets"])
def test_type_is_large_enough_on_a_telephone(name: str) -> None:
    assert smallest_type((FIGURES / f"{name}.svg").read_text()) >= SMALLEST


def smallest_type(drawn: str) -> float:
    """Pixels of the smallest type of a figure that is as wide as a telephone."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ', drawn)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", drawn)]
    assert box
    assert sizes
    return min(sizes) * TELEPHONE / float(box[1])


def draw(content: LadderReport, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("ladder_figure", DOCS / "ladder_figure.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with plt.rc_context({"font.size": 15, "svg.fonttype": "none"}):
        return module.draw_ladder(content, path)


def test_a_ladder_has_a_panel_for_each_scheme_and_a_box_for_each_forecast(tmp_path: Path) -> None:
    content = reports.full()
    figure = draw(content, tmp_path / "ladder.svg")
    # Long names are wrapped.
    assert ["".join(axes.get_title().split()) for axes in figure.axes] == [
        "".join(name.split()) for name in content.schemes[1:]
    ]
    for scheme, axes in zip(content.answer.schemes, figure.axes, strict=True):
        boxes = {(round(bar.get_y(), 9), round(bar.get_y() + bar.get_height(), 9)) for bar in axes.patches}
        own = [entry.forecast for entry in content.held_out if entry.scheme == scheme.scheme]
        assert boxes == {(round(one.low, 9), round(one.high, 9)) for one in own}
        # A cell that enters no fit has no interval.
        assert len(axes.collections) == sum(cell.is_usable for cell in scheme.cells)
        drawn = {round(float(y), 9) for line in axes.lines for y in line.get_ydata()}
        assert {round(sum(c.differences.values()) / len(c.differences), 9) for c in scheme.cells if c.gap} <= drawn
    assert smallest_type((tmp_path / "ladder.svg").read_text()) >= SMALLEST


def test_the_widest_forecast_ends_within_its_panel(tmp_path: Path) -> None:
    content = reports.full()
    first, *others = content.answer.schemes
    wide = [replace(own, forecast=replace(own.forecast, low=-1.0, high=1.0)) for own in content.held_out]
    answer = replace(content.answer, schemes=[replace(first, held_out=wide), *others])
    figure = draw(replace(content, answer=answer), tmp_path / "ladder.svg")
    low, high = figure.axes[0].get_ylim()
    assert low < -1.0
    assert high > 1.0
