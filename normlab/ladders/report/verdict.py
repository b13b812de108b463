"""Headline and findings of a ladder: who is better at the top, how the gap moves, what is identified beyond it."""

from __future__ import annotations

import math

from normlab.ladders.report.content import LadderCell, LadderReport, best_interval, cell_at, side
from normlab.ladders.statistics.answer import HeldOut, SchemeAnswer, TrendTest, place_name
from normlab.ladders.statistics.estimators.layout import Side, unvaried
from normlab.ladders.statistics.sentence import in_compute
from normlab.pages.numbers import fixed, join_names, minus
from normlab.utils.text import capitalised

_MOVES = {
    "shrinks": ", by fewer nats with more compute",
    "grows": ", by more nats with more compute",
    "constant": ", by the same within {margin:.3f} nats throughout",
    "crosses": ", but was {other} with less compute",
}
"""How the gap in nats moves within the ladder, said after the side at the top."""
_REMOVES: dict[tuple[Side, ...], str] = {
    ("size",): "no more tokens remove at this size",
    ("tokens",): "no larger size removes with these tokens",
}
"""What E is on a ladder that has one size, or one budget."""


def headline(content: LadderReport) -> str:
    """Who is better at the top of the ladder and how that moved; figures are in the findings."""
    top = content.top
    if top is None:
        names = {row.scheme for row in content.rows}
        if len(names) == 1:
            return f"No verdict: a gap needs two schemes, and only {names.pop()} has runs that ended."
        return "No verdict: no cell counts; the cautions say why."
    return f"At {content.top_words} ({top.name}) {'; '.join(_clauses(content, top))}."


def findings(content: LadderReport) -> list[str]:
    """One sentence for each scheme, then how the forecast did."""
    sentences = [minus(own.sentence) for own in content.answer.schemes]
    return [line for line in (*sentences, forecast_sentence(content.held_out)) if line]


def reasons(own: SchemeAnswer) -> list[str]:
    """Why the gap of a scheme is not identified, as sentences."""
    texts = [minus(obstacle.text) for obstacle in own.identified.reasons]
    return [f"{capitalised(text).rstrip('.')}." for text in texts]


def forecast_sentence(entries: list[HeldOut]) -> str:
    """How many forecasts the results fell into, and how many have no result."""
    judged = [entry for entry in entries if entry.is_hit is not None]
    if not judged:
        return ""
    hits, simple = sum(entry.is_hit is True for entry in judged), [e for e in judged if e.is_simple_law_hit is not None]
    within = sum(entry.is_simple_law_hit is True for entry in simple)
    told = [f"{hits} of {len(judged)} forecast{'s' * (len(judged) != 1)} made before the runs held"]
    told += [f"{within} of {len(simple)} held that assume a simple law"] if simple else []
    missing = len(entries) - len(judged)
    told += [f"{missing} more {'has' if missing == 1 else 'have'} no result that counts"] if missing else []
    return f"{'; '.join(told)}."


def slope_sentence(content: LadderReport) -> str:
    """How fast the baseline's loss falls with compute at the top: this is well known, unlike the law's constants."""
    law = content.answer.baseline_law
    if law is None or not law.cells:
        return ""
    top = max(law.cells, key=lambda cell: cell.flops)
    less, low, high = (fixed(math.log(2) * slope, 3) for slope in (top.slope.mean, top.slope.low, top.slope.high))
    place = place_name(top.size, top.tokens)
    return (
        f"Twice the compute lowers the loss of {content.answer.baseline} by {less} nats ({low} to {high}) at {place}."
    )


def irreducible_sentence(content: LadderReport) -> str:
    """The range of E, or that there is none."""
    law = content.answer.baseline_law
    if law is None:
        return ""
    what = f"E, the loss that {_REMOVES.get(unvaried(law.cells), 'no compute removes')}, "
    found = law.irreducible
    if found is None:
        return f"{what}is not identified: the fitted law hardly leaves a value between zero and the smallest loss."
    return f"{what}lies anywhere from {found.low:.2f} to {found.high:.2f} nats."


def hit_words(entry: HeldOut, places: int = 4, reason: str | None = None) -> str:
    """A forecast against what came, in words; `reason`: why nothing did."""
    if entry.measured is None:
        return f"no result: {minus(reason)}" if reason else "not known yet"
    if entry.is_hit:
        return "hit: inside"
    ahead = "higher" if entry.measured > entry.forecast.high else "lower"
    off = entry.measured - (entry.forecast.high if ahead == "higher" else entry.forecast.low)
    return f"miss: {fixed(abs(off), places)} {ahead} than forecast"


def _clauses(content: LadderReport, top: LadderCell) -> list[str]:
    """Group schemes with the same verdict into one clause, best first."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for own in content.answer.schemes:
        what, move = _standing(own, top)
        alike.setdefault((what, move, _lost(content, own.scheme, top, what)), []).append(own.scheme)
    order = ["better", "worse", "open", "own seeds", "one seed", "not judged"]
    return [
        _clause(what, move, names, content.answer.baseline) + lost
        for (what, move, lost), names in sorted(alike.items(), key=lambda item: order.index(item[0][0]))
    ]


def _standing(own: SchemeAnswer, top: LadderCell) -> tuple[str, str]:
    """The side of a scheme at the top, and how its gap came there."""
    cell = cell_at(own, top)
    if cell is None or not cell.is_usable:
        return "not judged", ""
    interval = best_interval(cell)
    if interval is None:
        return "one seed", ""
    found = side(interval)
    test = own.trend.compute
    if found != "open":
        return found, _moves(test, "worse" if found == "better" else "better") if test is not None else ""
    if cell.gap is None:
        return "own seeds", ""
    before = side(test.gap_bottom) if test is not None and test.direction is not None else "open"
    return found, "" if before == "open" else f" {before} with less compute"


def _lost(content: LadderReport, scheme: str, top: LadderCell, what: str) -> str:
    """Runs of a scheme that did not train where it is not judged, or beyond the cell where it is."""
    if what == "not judged":
        rows = [row for row in content.rows if (row.scheme, row.size, row.tokens) == (scheme, top.size, top.tokens)]
        text = " ({} of {} runs did not train)"
    else:
        places = {(cell.size, cell.tokens) for cell in content.cells if cell.flops > top.flops}
        rows = [row for row in content.rows if row.scheme == scheme and (row.size, row.tokens) in places]
        text = ", but {} of {} runs with more compute did not train"
    lost = sum(not row.is_usable for row in rows)
    return text.format(lost, len(rows)) if lost else ""


def _moves(test: TrendTest, other: str) -> str:
    """How the gap moves in nats, and what the compute multiplier does: only both together say what is gained."""
    if test.verdict == "not shown":
        moves = test.multiplier_moves
        return f", and the compute multiplier {moves} with more compute" if moves in ("rises", "falls") else ""
    in_nats = _MOVES[test.verdict].format(margin=test.margin, other=other)
    # A gap that changes sign says by itself on which side the multiplier was.
    return in_nats if test.verdict == "crosses" else in_nats + in_compute(test)


def _clause(what: str, move: str, names: list[str], baseline: str) -> str:
    who = join_names(names)
    if what in ("better", "worse"):
        return f"{who} {'is' if len(names) == 1 else 'are'} {what} than {baseline}{move}"
    if what == "open":
        before = f", though {'it was' if len(names) == 1 else 'they were'}{move}" if move else ""
        return f"no difference to {baseline} is shown for {who}{before}"
    if what == "own seeds":
        return f"its seeds alone do not show on which side of {baseline} {who} {'is' if len(names) == 1 else 'are'}"
    if what == "one seed":
        return f"one seed is no evidence for or against {who}"
    return f"{who} {'was' if len(names) == 1 else 'were'} not judged there"
