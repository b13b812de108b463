"""Unfinished parts of a comparison: judging seeds, and learning-rate searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normlab.compare.bracket import Bracket, RateList
from normlab.compare.report.results import Results
from normlab.compare.statistics import SchemeResult
from normlab.pages.numbers import join_names


def unended(results: Results) -> str:
    """One sentence for the headline, e.g. "Not ended: 2 of 5 seeds."; empty once all planned runs have ended.

    Also empty where compare.json, which has the plan, is missing.
    """
    schemes, seeds = results.about.get("schemes"), results.about.get("seeds")
    if not isinstance(schemes, list) or not isinstance(seeds, int):
        return ""
    own = {str(name): results.scheme_result(str(name)) for name in schemes}
    searching = [results.label(name) for name, result in own.items() if _is_searching(results, result)]
    parts = [f"the search for the rate of {join_names(searching)}"] if searching else []
    parts += _seeds_left(results, own, seeds)
    return f"Not ended: {'; '.join(parts)}." if parts else ""


def _seeds_left(results: Results, own: dict[str, SchemeResult | None], seeds: int) -> list[str]:
    by_number: dict[int, list[str]] = {}
    for name, result in own.items():
        # A scheme that trained at no rate is not judged.
        is_lost = result is not None and result.lr is None and not _is_searching(results, result)
        if (ended := len(result.values) if result else 0) < seeds and not is_lost:
            by_number.setdefault(ended, []).append(results.label(name))
    if any(len(labels) == len(own) for labels in by_number.values()):
        return [f"{ended} of {seeds} seeds" for ended in by_number]
    return [f"{ended} of {seeds} seeds of {join_names(labels)}" for ended, labels in by_number.items()]


def _is_searching(results: Results, own: SchemeResult | None) -> bool:
    """Whether tune runs of a scheme are still to come."""
    about = results.about
    lrs, tune_seeds = about.get("lrs"), about.get("tune_seeds", 1)
    tune = own.tune if own is not None else {}
    whole = {lr: at_rate for lr, at_rate in tune.items() if len(at_rate.values) >= tune_seeds}
    if isinstance(lrs, list) and not about.get("widen_rates"):
        # With one rate nothing is tuned.
        return len(lrs) > 1 and len(whole) < len(lrs)
    search = _search(about)
    scores = {lr: at_rate.score(results.metric) for lr, at_rate in whole.items()}
    return search is not None and bool(search.next(scores).next_rates)


def _search(about: Mapping[str, Any]) -> Bracket | RateList | None:
    """The search for rates that compare.json describes."""
    if isinstance(about.get("lrs"), list):
        return RateList(tuple(about["lrs"]))
    rates = about.get("rates")
    if not isinstance(rates, dict) or len(rates.get("first", [])) != 3:
        return None
    # The start is the middle one of the rates that are always tried.
    return Bracket(rates["first"][1], about.get("refine_rates", True))
