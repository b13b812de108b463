"""When the forecasts of a ladder were written, of whom, and for what their intervals hold together."""

from __future__ import annotations

from normlab.compare.statistics import bonferroni_level
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.design import ForecastFacts
from normlab.pages.numbers import join_names


def forecast_notes(content: LadderReport) -> list[str]:
    """A sentence for each forecast with its date, then one on the level of their intervals."""
    design, stored = content.design, content.design.forecast
    if stored is None or not content.held_out:
        return []
    size = design.held_out or content.held_out[0].place.size
    first = f"Forecast of {size} {_written(stored)}, before its first run began{_sources(stored)}."
    further = [
        f"Forecast of {join_names(one.schemes)} at {size} {_written(one)}, before {_whose(one)} first run there "
        f"began{_sources(one)}."
        for one in design.further_forecasts
    ]
    return [first, *further, _family(content)]


def _written(stored: ForecastFacts) -> str:
    date, time = stored.written[:10], stored.written[11:16]
    return f"written on {date}" + (f" at {time}" if time else "")


def _whose(stored: ForecastFacts) -> str:
    return "its" if len(stored.schemes) == 1 else "their"


def _sources(stored: ForecastFacts) -> str:
    known = {"commit": stored.commit, "hash": stored.hash}
    return "".join(f"; {name} {text}" for name, text in known.items() if text)


def _family(content: LadderReport) -> str:
    """What the intervals hold together for; forecasts of older versions were corrected over the schemes alone."""
    level, number = min(entry.forecast.level for entry in content.held_out), len(content.held_out)
    if number == 1:
        return ""
    are_joint = level >= bonferroni_level(content.answer.level, number + 1) - 1e-9
    if not are_joint:
        return f"Each interval has {100 * level:.3g} %, corrected over schemes, not over budgets."
    joint = 100 * content.answer.level
    return f"Each interval has {100 * level:.3g} %, so that all {number} hold together with {joint:g} %."
