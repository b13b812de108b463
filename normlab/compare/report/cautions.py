"""Cautions about a ranking: rates at the edge of the grid, an order that depends on the rate, outlier seeds."""

from __future__ import annotations

from collections import Counter

from normlab.compare.mixed_settings import mixed_cautions
from normlab.compare.report.restored import restored_cautions
from normlab.compare.report.results import Results
from normlab.compare.statistics import SchemeResult, paired_difference, tune_outliers
from normlab.pages.numbers import decimals, fixed, join_names, rate
from normlab.utils.text import counted


def cautions(results: Results) -> list[str]:
    """All cautions about a ranking, most serious first."""
    return [
        *edge_cautions(results),
        *_reversals(results),
        *_surprises(results),
        *_doubled(results),
        *mixed_cautions(run.row for run in results.runs if run.row),
        *_interrupted(results),
        *_unfinished(results),
        *restored_cautions([run.row for run in results.runs]),
    ]


def difference_digits(results: Results) -> int:
    """Number of decimals for the uncertainty of the differences in this comparison."""
    differences = [own.difference for own in results.standings]
    return decimals(d.high - d.low for d in differences if d is not None and d.high is not None and d.low is not None)


def edge_cautions(results: Results) -> list[str]:
    """Rates that are the largest or smallest tried; schemes with the same rate share a sentence."""
    alike: dict[tuple[str, float], list[str]] = {}
    for own in results.standings:
        if own.edge and own.lr is not None:
            alike.setdefault((own.edge_words, own.lr), []).append(own.label)
    limit = ", the limit of the search" if results.about.get("lrs") == "auto" else ""
    return [
        f"The best rate of {join_names(labels)} is {words} ({rate(lr)}){limit}: a better one may lie beyond it."
        for (words, lr), labels in alike.items()
    ]


def edge_summary(results: Results) -> str:
    """The same as one sentence for the headline."""
    found: dict[str, list[str]] = {}
    for own in sorted(results.standings, key=lambda own: own.edge or ""):
        if own.edge and own.values:
            found.setdefault(own.edge_words, []).append(own.label)
    parts = [f"{words} for {join_names(labels)}" for words, labels in found.items()]
    return f"Rates are not bracketed: the best is {', and '.join(parts)}." if parts else ""


def _reversals(results: Results) -> list[str]:
    """Schemes whose difference to the baseline changes sign at another rate, according to the tune runs."""
    base = results.scheme_result(results.baseline or "")
    told = [own for own in results.standings if base is not None and own.verdict in ("better", "worse")]
    return [line for own in told if base is not None and (line := _reversal(own, base, difference_digits(results)))]


def _reversal(own: SchemeResult, base: SchemeResult, places: int) -> str | None:
    assert own.difference is not None
    gaps = _gaps_by_rate(own, base)
    against = {lr: gap for lr, gap in gaps.items() if gap[0] * own.difference.mean < 0}
    if not against:
        return None
    lr = max(against, key=lambda lr: abs(against[lr][0]))
    here, there = ("below", "above") if own.difference.mean < 0 else ("above", "below")
    gap, seeds = against[lr]
    return (
        f"{own.label} is {here} {base.label} at the picked rates ({rate(own.lr)} and {rate(base.lr)}), but "
        f"{fixed(abs(gap), places)} {there} it where both have {rate(lr)} ({counted(seeds, 'tuning seed')}): "
        "the order depends on the rate."
    )


def _gaps_by_rate(own: SchemeResult, base: SchemeResult) -> dict[float, tuple[float, int]]:
    """Mean difference of the tune runs and number of seeds, by rate, where both trained."""
    gaps: dict[float, tuple[float, int]] = {}
    for lr in own.tune.keys() & base.tune.keys():
        mine, theirs = own.tune[lr].values, base.tune[lr].values
        if any(value is not None and theirs.get(seed) is not None for seed, value in mine.items()):
            found = paired_difference(mine, theirs)
            gaps[lr] = (found.mean, found.n)
    return gaps


def _surprises(results: Results) -> list[str]:
    """Schemes whose tune runs are outliers among their judge runs."""
    places = difference_digits(results)
    found = [(own, [fixed(value, places) for value in far]) for own in results.standings if (far := tune_outliers(own))]
    return [
        f"{own.label} ended at {join_names(far)} with {'a seed' if len(far) == 1 else 'seeds'} that picked its rate, "
        f"at {fixed(min(own.finished), places)} to {fixed(max(own.finished), places)} with those that judge it: seeds "
        "decide how well it trains. --tune-seeds 3 makes a surer choice."
        for own, far in found
    ]


def _doubled(results: Results) -> list[str]:
    """Seeds with several runs at one rate, as where rows of two comparisons were put into one file."""
    ended = [run for run in results.runs if run.row and run.state in ("done", "failed")]
    runs = Counter((run.label, run.role, run.lr, run.seed) for run in ended)
    return [
        f"{label}: {number} runs have seed {seed} at the rate {rate(lr)}; the last one counts."
        for (label, _, lr, seed), number in runs.items()
        if number > 1 and seed is not None
    ]


def _interrupted(results: Results) -> list[str]:
    killed = [run for run in results.runs if run.state == "interrupted"]
    if not killed:
        return []
    labels = join_names(dict.fromkeys(run.label for run in killed))
    part = "it is" if len(killed) == 1 else "they are"
    return [f"{len(killed)} of {len(results.runs)} runs interrupted ({labels}; killed): {part} part of nothing here."]


def _unfinished(results: Results) -> list[str]:
    waiting = [run for run in results.runs if run.state not in ("done", "failed", "interrupted")]
    if not waiting:
        return []
    verb = "has" if len(waiting) == 1 else "have"
    return [f"{len(waiting)} of {len(results.runs)} runs {verb} not ended; this shows what there is so far."]
