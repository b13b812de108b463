"""What the runs show, in words: a winner only where the intervals name one, and everything that failed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from normlab.compare.statistics import Difference, Standing, minimum_detectable, outsiders, simultaneous, winner
from normlab.report.load import Results, Run
from normlab.report.numbers import count, decimals, fixed, listed, rate
from normlab.train.metrics import Metric


@dataclass(frozen=True)
class Verdict:
    """One sentence for the head of the page, those that support it, and what to keep in mind."""

    headline: str
    findings: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)


def verdict(results: Results) -> Verdict:
    """The verdict on a comparison or on a single run."""
    if results.kind == "run":
        return _on_run(results.runs[0], results.metric)
    failures = [line for scheme in results.schemes if (line := _failures(results, scheme))]
    if results.problem:
        return Verdict(f"No verdict: {results.problem}.", failures, _unfinished(results))
    findings = [line for own in results.standings if (line := _finding(results, own))]
    cautions = [*_edges(results), *_surprises(results), *_resolution(results), *_unfinished(results)]
    return Verdict(_headline(results), findings + failures, cautions)


def digits(results: Results) -> int:
    """Decimals that suit the uncertainty of the differences in this comparison."""
    differences = [own.difference for own in results.standings]
    return decimals(d.high - d.low for d in differences if d is not None and d.high is not None and d.low is not None)


def where(run: Run) -> str:
    """Why a run failed, with step and layer if its events know them."""
    reason = run.reason or "no reason recorded"
    faults = [event for event in run.metrics.event if event.get("what") in ("nonfinite", "spike")]
    if not faults:
        return reason
    last = faults[-1]
    if f"step {last['step']}" not in reason:
        reason += f", step {last['step']}"
    layer = last.get("layer")
    return f"{reason}, layer {layer}" if layer and str(layer) not in reason else reason


def _headline(results: Results) -> str:
    best, base = winner(results.standings, results.level), results.label(results.baseline or "")
    better_result = f"a {results.metric.comparative} {results.metric.title}"
    if best is not None:
        return _of_winner(results, best, base)
    if not any(own.finished for own in results.standings):
        return "No verdict: no scheme has a finished judge run at its picked rate."
    better = [own.label for own in results.standings if own.verdict == "better"]
    if len(better) > 1:
        return f"{listed(better)} reach {better_result} than {base}; which of them is best is not shown."
    if better:
        return f"{better[0]} reaches {better_result} than {base}; that it is the best of all is not shown."
    if not any(own.difference for own in results.standings):
        return "No verdict: there is nothing to compare yet."
    if all(own.difference.n == 1 for own in results.standings if own.difference):
        return "No winner: one seed for each scheme shows no difference."
    return f"No winner: no scheme is shown to reach {better_result} than {base}."


def _of_winner(results: Results, best: Standing, base: str) -> str:
    metric = results.metric
    best_result = f"the {metric.superlative} {metric.title}"
    if best.difference is None:
        return f"{best.label}, the baseline, reaches {best_result}: every other scheme that finished is worse."
    found, places, share = best.difference, digits(results), f"{100 * results.level:g} %"
    # By how much it is better, from the least to the most.
    size, *ends = (-metric.sign * x if x is not None else None for x in (found.mean, found.low, found.high))
    least, most = sorted(ends, key=lambda end: end or 0.0)
    sure = f"{share} interval {fixed(least, places)} to {fixed(most, places)}, {_seeds(found.n)}"
    side = "above" if metric.higher else "below"
    return f"{best.label} reaches {best_result}: {fixed(size, places)} {side} {base} ({sure})."


def _finding(results: Results, own: Standing) -> str | None:
    base, difference = results.label(results.baseline or ""), own.difference
    if own.verdict == "not judged":
        return f"{own.label} is not judged: it has no judge run at its picked rate."
    if own.verdict == "no pairs":
        return f"{own.label} shares no finished seed with {base}, so it cannot be compared."
    if difference is None:
        return None
    size, places = abs(difference.mean), digits(results)
    side = "below" if difference.mean < 0 else "above"
    mean = f"{fixed(size, places)} {side} {base}"
    if own.verdict == "one seed":
        return f"{own.label}: {mean}, from one seed: no interval, no claim."
    if own.verdict == "unreliable":
        failed = f"{own.failed} of {len(own.values)} judge runs failed"
        return f"{own.label}: {mean} where both finished ({_seeds(difference.n)}), but {failed}: no claim."
    interval = _interval_words(difference, places)
    if own.verdict == "no difference shown":
        return f"{own.label}: no difference to {base} shown; {interval} spans zero."
    return f"{own.label} is {own.verdict}: {mean}; {interval}."


def _interval_words(difference: Difference, places: int) -> str:
    low, high = fixed(difference.low, places), fixed(difference.high, places)
    return f"the interval from {low} to {high} ({_seeds(difference.n)})"


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def _failures(results: Results, scheme: str) -> str | None:
    own = [run for run in results.runs if run.scheme == scheme]
    failed = [run for run in own if run.state == "failed"]
    if not failed:
        return None
    ended = [run for run in own if run.state in ("done", "failed")]
    share = "every run" if len(failed) == len(ended) else f"{len(failed)} of {len(ended)} runs"
    # Judge runs first, then the lowest rate: the failure that matters most.
    worst = min(failed, key=lambda run: (run.role != "judge", run.lr or math.inf, run.seed or 0))
    example = f"{where(worst)} (rate {rate(worst.lr)}, seed {worst.seed})"
    return f"{results.label(scheme)}: {share} failed; {example}."


def _edges(results: Results) -> list[str]:
    """Rates at an end of the grid, schemes of the same rate in one sentence."""
    alike: dict[tuple[str, float], list[str]] = {}
    for own in results.standings:
        if own.edge and own.lr is not None:
            alike.setdefault((own.edge, own.lr), []).append(own.label)
    return [
        f"The best rate of {listed(labels)} is the {edge} tried ({rate(lr)}): a better one may lie beyond it."
        for (edge, lr), labels in alike.items()
    ]


def _surprises(results: Results) -> list[str]:
    """Schemes whose seeds disagree: what picked the rate tells nothing of what judges it."""
    places = digits(results)
    found = [(own, [fixed(value, places) for value in far]) for own in results.standings if (far := outsiders(own))]
    return [
        f"{own.label} ended at {listed(far)} with {'a seed' if len(far) == 1 else 'seeds'} that picked its rate, at "
        f"{fixed(min(own.finished), places)} to {fixed(max(own.finished), places)} with those that judge it: seeds "
        "decide how well it trains. --tune-seeds 3 makes a surer choice."
        for own, far in found
    ]


def _resolution(results: Results) -> list[str]:
    """What so many seeds could have shown, where something was not shown."""
    open_ = [own.difference for own in results.standings if own.verdict == "no difference shown" and own.difference]
    sizes = [minimum_detectable(d.n, d.sd, d.level) for d in open_ if d.sd]
    if not sizes:
        return []
    smallest = fixed(max(sizes), digits(results))
    return [f"With these seeds and this spread, a true difference of {smallest} is shown four times out of five."]


def _unfinished(results: Results) -> list[str]:
    waiting = [run for run in results.runs if run.state not in ("done", "failed")]
    if not waiting:
        return []
    verb = "has" if len(waiting) == 1 else "have"
    return [f"{len(waiting)} of {len(results.runs)} runs {verb} not ended; this shows what there is so far."]


def level_note(results: Results) -> str:
    """What the intervals promise, for the foot of a table."""
    share, others = f"{100 * results.level:g} %", len(results.standings) - 1
    each = f"{100 * simultaneous(results.level, len(results.standings)):.2f} %"
    wide = f", widened for {others} comparisons (each at {each}) so that all hold together with {share} confidence"
    return (
        f"{results.metric.comparative.capitalize()} is better. Paired Student intervals over seeds"
        f"{wide if others > 1 else f' at {share}'}. Seeds that "
        "picked a rate do not judge it; 'largest' or 'smallest' marks a rate at an end of those tried."
    )


def _on_run(run: Run, metric: Metric) -> Verdict:
    value, at = run.row.get(metric.field), count(run.row.get("tokens"))
    tail = f"{metric.title} {fixed(value)} after {at} tokens" if value is not None else "no evaluation yet"
    if run.state == "failed":
        return Verdict(f"{run.label} failed: {where(run)}.", [f"Before that: {tail}."])
    states = {"done": "finished", "running": "is running", "stopped": "was stopped", "stuck": "is stuck"}
    note = [] if run.state in ("done", "stuck") else ["The run has not ended; this shows what there is so far."]
    return Verdict(f"{run.label} {states.get(run.state, 'has no recorded state')}: {tail}.", [], note)
