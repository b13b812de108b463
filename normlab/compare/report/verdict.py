"""Headline and findings of the report: names a winner only if the confidence intervals do, and lists failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from normlab.compare.report.budget import budget_unit, trained_on, unit_of
from normlab.compare.report.cautions import cautions, difference_digits, edge_summary
from normlab.compare.report.results import ReportedRun, Results
from normlab.compare.report.unended import unended
from normlab.compare.statistics import Difference, SchemeResult, bonferroni_level, find_winner
from normlab.pages.numbers import fixed, format_count, join_names, rate
from normlab.train.metrics import Metric
from normlab.utils.text import counted


@dataclass(frozen=True)
class Conclusion:
    """Headline of the page, supporting findings, and cautions."""

    headline: str
    findings: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)


def verdict(results: Results) -> Conclusion:
    """The verdict on a comparison or on a single run."""
    if results.kind == "run":
        return _on_run(results.runs[0], results.metric)
    tellers = (_failures, _stuck)
    lost = [line for scheme in results.schemes for tell in tellers if (line := tell(results, scheme))]
    if results.problem:
        return Conclusion(f"No verdict: {results.problem}.", lost, cautions(results))
    findings = [line for own in results.standings if (line := _finding(results, own))]
    # Conditions of the claim are part of the headline.
    headline = [_claim(results), _stuck_in_brief(results), edge_summary(results)]
    return Conclusion(" ".join(filter(None, headline)), findings + lost, cautions(results))


def failure_reason(run: ReportedRun) -> str:
    """Why a run failed, with step and layer if its events contain them."""
    reason = run.reason or "no reason recorded"
    faults = [event for event in run.metrics.event if event.get("what") in ("nonfinite", "spike")]
    if not faults:
        return reason
    last = faults[-1]
    if f"step {last['step']}" not in reason:
        reason += f", step {last['step']}"
    layer = last.get("layer")
    return f"{reason}, layer {layer}" if layer and str(layer) not in reason else reason


def _claim(results: Results) -> str:
    """Who is better, once every planned run has ended; until then what has not."""
    found, waiting = _finding_of_best(results), unended(results)
    if found and not waiting:
        return found
    # Seeds to come may undo an order, and whoever stops at the first that pleases would choose it.
    return " ".join(filter(None, ["No winner yet." if found else _no_winner(results), waiting]))


def _finding_of_best(results: Results) -> str | None:
    """The winner, or those that are better than the baseline; None if there are none."""
    best, base = find_winner(results.standings, results.level), results.label(results.baseline or "")
    if best is not None:
        return _of_winner(results, best, base)
    better = [own.label for own in results.standings if own.verdict == "better"]
    claim = f"a {results.metric.comparative} {results.metric.title} than {base}{_budget(results)}"
    if len(better) > 1:
        return f"{join_names(better)} reach {claim}; which of them is best is not shown."
    return f"{better[0]} reaches {claim}; that it is the best of all is not shown." if better else None


def _no_winner(results: Results) -> str:
    differences = [own.difference for own in results.standings if own.difference]
    if not any(own.finished for own in results.standings):
        return "No verdict: no scheme has a finished judge run at its picked rate."
    if not differences:
        return "No verdict: there is nothing to compare yet."
    if all(difference.n == 1 for difference in differences):
        return "No winner: one seed for each scheme shows no difference."
    metric, base = results.metric, results.label(results.baseline or "")
    return (
        f"No winner: no scheme is shown to reach a {metric.comparative} {metric.title} than {base}{_budget(results)}."
    )


def _of_winner(results: Results, best: SchemeResult, base: str) -> str:
    metric = results.metric
    best_result = f"the {metric.superlative} {metric.title}"
    if best.verdict == "baseline":
        return f"{best.label}, the baseline, reaches {best_result}: every other scheme that finished is worse."
    if best.verdict != "better" or best.difference is None:
        # A baseline that failed or was stuck is not among those that the winner was held against.
        others = [own.label for own in results.standings if own.finished and not own.lost and own is not best]
        return (
            f"{best.label} reaches a {metric.comparative} {metric.title} than {join_names(others)}{_budget(results)}; "
            f"that it is better than {base} is not shown."
        )
    found, places, share = best.difference, difference_digits(results), f"{100 * results.level:g} %"
    # The size of the improvement, with its smallest and largest value.
    size, *ends = (-metric.sign * x if x is not None else None for x in (found.mean, found.low, found.high))
    least, most = sorted(ends, key=lambda end: end or 0.0)
    sure = f"{share} interval {fixed(least, places)} to {fixed(most, places)}, {counted(found.n, 'seed')}"
    side = "above" if metric.higher else "below"
    rates = dict.fromkeys(
        rate(own.lr) for own in (best, results.scheme_result(results.baseline or "")) if own and own.lr
    )
    held = f"{_budget(results)}, rate{'s' * (len(rates) > 1)} {join_names(rates)}" if rates else _budget(results)
    return (
        f"{best.label} reaches {best_result}: {fixed(size, places)} {side} {base} ({sure};{held.removeprefix(' at')})."
    )


def _budget(results: Results) -> str:
    """Budget of a claim: the order may differ at another budget."""
    known = [number for run in results.runs if run.state == "done" and (number := trained_on(run))]
    return f" at {format_count(max(known))} {unit_of(results)} a run" if known else ""


def _stuck_in_brief(results: Results) -> str:
    """Schemes with stuck judge runs, for the headline."""
    parts = [f"{own.label} was stuck with {_share(len(own.stuck), own)}" for own in results.standings if own.stuck]
    return f"{join_names(parts)}." if parts else ""


def _share(number: int, own: SchemeResult) -> str:
    total = len(own.values)
    return f"all {total} judging seeds" if number == total > 1 else f"{number} of {counted(total, 'judging seed')}"


def _finding(results: Results, own: SchemeResult) -> str | None:
    base, difference = results.label(results.baseline or ""), own.difference
    if own.verdict == "not judged":
        return f"{own.label} is not judged: it has no judge run at its picked rate."
    if own.verdict == "stuck":
        return _stuck_finding(results, own)
    if own.verdict == "no pairs":
        return f"{own.label} shares no finished seed with {base}, so it cannot be compared."
    if difference is None:
        return None
    size, places = abs(difference.mean), difference_digits(results)
    side = "below" if difference.mean < 0 else "above"
    mean = f"{fixed(size, places)} {side} {base}"
    if own.verdict == "one seed":
        return f"{own.label}: {mean}, from one seed: no interval, no claim."
    seeds = counted(difference.n, "seed")
    if own.verdict == "unreliable":
        lost = [f"{number} {what}" for number, what in ((own.failed, "failed"), (len(own.stuck), "stuck")) if number]
        return (
            f"{own.label}: {mean} where both trained ({seeds}), but of {len(own.values)} judge runs {join_names(lost)}"
            ": no claim."
        )
    if difference.low is None:
        return f"{own.label}: {mean} with each of {seeds}: no scatter, so no interval and no claim."
    interval = _interval_words(difference, places)
    if own.verdict == "no difference shown":
        return f"{own.label}: no difference to {base} shown; {interval} spans zero{_power(own, places)}."
    return f"{own.label} is {own.verdict}: {mean}; {interval}."


def _stuck_finding(results: Results, own: SchemeResult) -> str:
    ends = dict.fromkeys(fixed(end, 3) for end in own.stuck.values() if end is not None)
    end = f"at {join_names(ends)}" if ends else "early"
    judged = [run for run in results.runs if (run.scheme, run.role) == (own.scheme, "judge")]
    if any(run.has_recovered for run in judged):
        return f"{own.label} was stuck at its rate ({rate(own.lr)}) and recovered too late: it ended {end}."
    return f"{own.label} did not train at its rate ({rate(own.lr)}): it ended {end}."


def _interval_words(difference: Difference, places: int) -> str:
    low, high = fixed(difference.low, places), fixed(difference.high, places)
    return f"the interval from {low} to {high} ({counted(difference.n, 'seed')})"


def _power(own: SchemeResult, places: int) -> str:
    """Statistical power with this number of seeds."""
    if own.detectable is None:
        return ""
    return f"; a true difference of {fixed(own.detectable, places)} would be shown four times out of five"


def _failures(results: Results, scheme: str) -> str | None:
    own = [run for run in results.runs if run.scheme == scheme]
    failed = [run for run in own if run.has_failed]
    if not failed:
        return None
    ended = [run for run in own if run.state in ("done", "failed")]
    share = "every run" if len(failed) == len(ended) else f"{len(failed)} of {len(ended)} runs"
    # Judge runs first, then the lowest rate: the most relevant failure.
    worst = min(failed, key=lambda run: (run.role != "judge", run.lr or math.inf, run.seed or 0))
    example = f"{failure_reason(worst)} (rate {rate(worst.lr)}, seed {worst.seed})"
    return f"{results.label(scheme)}: {share} failed; {example}."


def _stuck(results: Results, scheme: str) -> str | None:
    """Number of stuck runs of a scheme, with their rates."""
    ended = [run for run in results.runs if run.scheme == scheme and run.state in ("done", "failed")]
    stuck = [run for run in ended if run.is_stuck]
    if not stuck:
        return None
    rates = join_names(dict.fromkeys(rate(run.lr) for run in sorted(stuck, key=lambda run: run.lr or 0.0)))
    recovered = sum(run.has_recovered for run in stuck)
    back = f" ({counted(recovered, 'run')} recovered later)" if recovered else ""
    return (
        f"{results.label(scheme)}: {len(stuck)} of {len(ended)} runs stuck (rate {rates}): their loss was not "
        f"0.1 below {results.metric.guess} 300 steps after warm-up, or at the end{back}. "
        "They are left out of all means."
    )


def level_note(results: Results) -> str:
    """Explanation of the intervals, for the note below a table."""
    share, others = f"{100 * results.level:g} %", len(results.standings) - 1
    each = f"{100 * bonferroni_level(results.level, len(results.standings)):.2f} %"
    wide = f", widened for {others} comparisons (each at {each}) so that all hold together with {share} confidence"
    return (
        f"{results.metric.comparative.capitalize()} is better. Paired Student intervals over seeds"
        f"{wide if others > 1 else f' at {share}'}. Seeds that "
        "picked a rate do not judge it; 'largest' or 'smallest' marks a rate at an end of those tried. "
        "'Detectable' is the true difference that these seeds would show four times out of five. "
        "Runs that failed, were stuck or interrupted are left out of all means."
    )


def _on_run(run: ReportedRun, metric: Metric) -> Conclusion:
    value, at = run.row.get(metric.field), f"{format_count(trained_on(run))} {budget_unit(run.config)}"
    tail = f"{metric.title} {fixed(value)} after {at}" if value is not None else "no evaluation yet"
    if run.state == "failed":
        return Conclusion(f"{run.label} failed: {failure_reason(run)}.", [f"Before that: {tail}."])
    if run.has_recovered:
        return Conclusion(f"{run.label} was stuck and recovered: {tail}.")
    if run.is_stuck:
        return Conclusion(f"{run.label} is stuck: {tail}, not 0.1 below {metric.guess}.")
    states = {"done": "finished", "running": "is running", "stopped": "was stopped"}
    note = [] if run.state == "done" else ["The run has not ended; this shows what there is so far."]
    return Conclusion(f"{run.label} {states.get(run.state, 'has no recorded state')}: {tail}.", [], note)
