"""Statistics of a ladder: gaps, intervals, trends, forecasts and verdicts, from rows alone and without torch."""

from normlab.ladders.statistics.answer import (
    CellForecast,
    Design,
    ExpectedWidth,
    Interval,
    LadderAnswer,
    Place,
    SchemeAnswer,
)
from normlab.ladders.statistics.design import expected_widths
from normlab.ladders.statistics.forecast import forecast
from normlab.ladders.statistics.identified import EdgeRate
from normlab.ladders.statistics.ladder_answer import answer

__all__ = [
    "CellForecast",
    "Design",
    "EdgeRate",
    "ExpectedWidth",
    "Interval",
    "LadderAnswer",
    "Place",
    "SchemeAnswer",
    "answer",
    "expected_widths",
    "forecast",
]
