"""When the forecasts of a ladder were written, of whom, and for what their intervals hold together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from normlab.compare.statistics import bonferroni_level
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.design import ForecastFacts
from normlab.ladders.statistics.answer import HeldOut
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
    return [line for line in (first, *further, *_families(content)) if line]


def _written(stored: ForecastFacts) -> str:
    date, time = stored.written[:10], stored.written[11:16]
    return f"written on {date}" + (f" at {time}" if time else "")


def _whose(stored: ForecastFacts) -> str:
    return "its" if len(stored.schemes) == 1 else "their"


def _sources(stored: ForecastFacts) -> str:
    known = {"commit": stored.commit, "hash": stored.hash}
    return "".join(f"; {name} {text}" for name, text in known.items() if text)


def _families(content: LadderReport) -> Iterator[str]:
    """What the intervals hold together for: those of one forecast, each of which has levels of its own."""
    stored = [own for own in (content.design.forecast, *content.design.further_forecasts) if own is not None]
    if len(stored) == 1:
        yield _family(content.held_out, content.answer.level, "")
        return
    for one in stored:
        if own := [entry for entry in content.held_out if entry.scheme in one.schemes]:
            names = join_names(dict.fromkeys(entry.scheme for entry in own))
            yield _family(own, content.answer.level, f" of {names}")


def _family(entries: Sequence[HeldOut], joint: float, of: str) -> str:
    """The level of the intervals of one forecast; those of older versions were corrected over the schemes alone."""
    if len(entries) < 2:
        return ""
    level, number = min(entry.forecast.level for entry in entries), len(entries)
    if level < bonferroni_level(joint, number + 1) - 1e-9:
        return f"Each interval{of} has {100 * level:.3g} %, corrected over schemes, not over budgets."
    which = "both" if number == 2 else f"all {number}"
    return f"Each interval{of} has {100 * level:.3g} %, so that {which} hold together with {100 * joint:g} %."
