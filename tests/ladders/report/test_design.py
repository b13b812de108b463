"""The design of a ladder as JSON, and forecasts against what came."""

from __future__ import annotations

import json

import pytest

from normlab.errors import NormLabError
from normlab.ladders.report.design import ForecastCell, LadderDesign
from tests.ladders.report import synthetic


def test_a_design_survives_json() -> None:
    design = synthetic.design()
    assert LadderDesign.from_dict(json.loads(json.dumps(design.to_dict()))) == design


def test_every_fact_may_be_missing() -> None:
    assert LadderDesign.from_dict({}) == LadderDesign()


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(NormLabError, match="helt_out"):
        LadderDesign.from_dict({"helt_out": "12x768"})
    with pytest.raises(NormLabError, match=r"ladder\.json\.sizes\[0\] has no 'label'"):
        LadderDesign.from_dict({"sizes": [{"depth": 4}]})


def test_a_forecast_is_a_hit_if_its_interval_contains_the_result() -> None:
    def cell(came: float | None) -> ForecastCell:
        return ForecastCell(
            scheme="peri", size="s", tokens=1, smooth=(-0.03, 0.01), simple_law=(-0.02, -0.01), came=came
        )

    assert (cell(-0.015).is_hit, cell(-0.015).is_simple_law_hit) == (True, True)
    assert (cell(0.005).is_hit, cell(0.005).is_simple_law_hit) == (True, False)
    assert (cell(0.02).is_hit, cell(0.02).is_simple_law_hit) == (False, False)
    assert (cell(None).is_hit, cell(None).is_simple_law_hit) == (None, None)
