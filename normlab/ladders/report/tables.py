"""Tables of a ladder, common to HTML and Markdown: gaps, projections, forecasts, rates, lost runs, assumptions."""

from __future__ import annotations

from collections.abc import Iterable

from normlab.ladders.report.content import LadderReport, best_interval, cell_at, mean_gap, side
from normlab.ladders.report.design import RateRule, RateSearchFacts, TriedRate
from normlab.ladders.report.verdict import hit_words
from normlab.ladders.statistics.answer import (
    FEW_STEPS,
    CellGap,
    HeldOut,
    Interval,
    MoreRuns,
    Projection,
    SchemeAnswer,
    place_name,
)
from normlab.ladders.statistics.cautions import FAR_OFF
from normlab.ladders.statistics.design import MOST_SEEDS
from normlab.pages.numbers import NONE, decimals, fixed, format_count, minus, rate, ratio, signed
from normlab.pages.tables import Cell, Column, Table, numeric_cell
from normlab.utils.text import counted

_SIDES = {"better": "▼ better", "worse": "▲ worse", "open": "≈ sign open"}
NOT_IDENTIFIED = Cell("not identified", "not identified", tone="not-judged", whole=True)
_ESTIMATORS = {"smooth": "smooth gap: intervals of every verdict", "simple_law": "simple law: dashed lines"}
_CARRIED = {
    "width": "carried over width",
    "width+depth": "carried over width and depth",
    "none": "falls with (depth · width²)^-0.2",
}


def gap_table(content: LadderReport) -> Table:
    """The gap of every scheme at every cell, with its interval and the multipliers."""
    places = gap_digits(content)
    columns = [
        Column("Scheme"), Column("Size"), Column("Tokens", True), Column("FLOPs", True), Column("Seeds", True),
        Column("Mean of seeds", True), Column(f"Gap, {_level(content)}"), Column("Says"),
        Column("Multiplier, FLOPs"), Column("Multiplier, time"), Column("Gap from this cell alone"), Column("Remarks"),
    ]  # fmt: skip
    rows = [
        _gap_row(content, own, cell, places)
        for own in content.answer.schemes
        for cell in sorted(own.cells, key=lambda cell: (cell.parameters, cell.tokens))
    ]
    return Table("Gaps at every cell", columns, rows, note=_gap_note(content)).filled()


def _gap_row(content: LadderReport, own: SchemeAnswer, cell: CellGap, places: int) -> list[Cell]:
    mean = mean_gap(cell)
    return [
        scheme_cell(content, own.scheme),
        Cell(cell.size, cell.parameters),
        numeric_cell(format_count(cell.tokens), cell.tokens),
        numeric_cell(flops(cell.flops), cell.flops),
        numeric_cell(str(cell.n), cell.n),
        numeric_cell(signed(mean, places), mean),
        interval_cell(cell.gap, places),
        _says(cell),
        times_cell(cell.multiplier),
        times_cell(cell.multiplier_in_time),
        interval_cell(cell.student, places),
        Cell("; ".join(_remarks(cell))),
    ]


def _says(cell: CellGap) -> Cell:
    interval = best_interval(cell)
    if not cell.is_usable or interval is None:
        words = "not judged" if not cell.is_usable else "one seed: no interval"
        return Cell(words, words)
    return side_cell(interval)


def side_cell(interval: Interval) -> Cell:
    """What an interval says about the sign of the gap."""
    found = side(interval)
    return Cell(_SIDES[found], found, tone="" if found == "open" else found, whole=True)


def _remarks(cell: CellGap) -> Iterable[str]:
    if not cell.is_usable:
        yield minus(cell.reason or "not part of the fit")
    if cell.few_steps:
        yield f"fewer than {FEW_STEPS:,} steps"
    if cell.off_sd is not None and abs(cell.off_sd) > FAR_OFF:
        yield f"{abs(cell.off_sd):.1f} sd from the fit"


def _gap_note(content: LadderReport) -> str:
    answered, cells = content.answer.schemes, [cell for own in content.answer.schemes for cell in own.cells]
    is_fitted, wide = any(cell.gap for cell in cells), ""
    if len(answered) > 1:
        wide = f", widened for {len(answered)} schemes so that at any one cell or place all of them hold together"
    how = (
        "take all cells together and assume only that the gap changes smoothly"
        if is_fitted
        else ("are those of each cell's own seeds, since nothing was fitted to the cells")
    )
    parts = [
        f"Gap: loss of the scheme less loss of {content.answer.baseline} in nats a token, seed by seed; below zero is "
        f"better. The {_level(content)} intervals {how}{wide}. Over all cells at once they do not: of many intervals "
        "some miss.",
        f"A multiplier of 1.1 means that {content.answer.baseline} would need 1.1 times the scheme's FLOPs, or time, "
        "for the same loss.",
    ]
    return " ".join(parts if any(cell.multiplier for cell in cells) else parts[:1])


def projection_table(content: LadderReport) -> Table:
    """The gap beyond the ladder: the 95 % interval, and what holds only under an assumption."""
    places = gap_digits(content)
    columns = [
        Column("Scheme"), Column("Place"), Column("Compute, × top", True), Column(f"Gap, {_level(content)}"),
        Column("Says"), Column("If it keeps a simple law"), Column("If the multiplier stays"),
        Column("Multiplier, FLOPs"), Column("Smaller than at the top", True),
    ]  # fmt: skip
    rows = [
        _projection_row(content, own, projection, places)
        for own in content.answer.schemes
        for projection in sorted(own.projections, key=lambda projection: projection.times_top)
    ]
    smooth = any(projection.is_smoothness for own in content.answer.schemes for projection in own.projections)
    note = (
        "Only the first interval assumes no law; the next two hold under the condition in their heading and are part "
        "of no verdict. The last column is the probability that the gap is smaller there than at the top, in brackets "
        "under a simple law."
    )
    if smooth:
        note += " An asterisk marks places beyond 100 times the top: there even the first interval holds only if the "
        note += "gap stays as smooth as within the ladder."
    return Table("Beyond the ladder", columns, rows, note=note).filled()


def _projection_row(content: LadderReport, own: SchemeAnswer, projection: Projection, places: int) -> list[Cell]:
    star = " *" if projection.is_smoothness else ""
    chance = f"{100 * projection.shrinks:.0f} % ({100 * projection.shrinks_simple_law:.0f} %)"
    return [
        scheme_cell(content, own.scheme),
        Cell(projection.place.name + star, projection.place.flops, whole=True),
        numeric_cell(ratio(projection.times_top), projection.times_top),
        interval_cell(projection.gap, places),
        NOT_IDENTIFIED if own.identified.against(projection.place.name) else side_cell(projection.gap),
        interval_cell(projection.simple_law, places),
        interval_cell(projection.constant_multiplier, places),
        times_cell(projection.multiplier),
        numeric_cell(chance, projection.shrinks),
    ]


def more_runs_table(content: LadderReport) -> Table:
    """What more runs would gain, as widths of the interval now and then."""
    columns = [
        Column("Scheme"), Column("Runs added"), Column("Place"), Column("Width now", True), Column("Width then", True),
        Column("Sign would show from", True),
    ]  # fmt: skip
    rows = []
    for own in content.answer.schemes:
        rows += [*_sign_row(content, own), *(_more_runs_row(content, own, more) for more in own.what_more)]
    note = (
        f"Width of the {_level(content)} interval of the gap in nats, as expected from the design with the noise "
        "that was measured. The sign shows for a gap larger than half the width. Seeds that show the sign at the "
        "largest cell do so four times out of five, if the gap is what its mean says."
    )
    return Table("What it would take", columns, rows, note=note)


def _sign_row(content: LadderReport, own: SchemeAnswer) -> list[list[Cell]]:
    """How many seeds would close an open sign at the largest cell."""
    top = own.top
    if top is None or top.gap is None or not top.gap.spans_zero:
        return []
    seeds = counted(own.seeds_for_sign, "more seed") if own.seeds_for_sign else f"over {MOST_SEEDS} more seeds"
    return [[
        scheme_cell(content, own.scheme),
        Cell(f"{seeds} at every cell", seeds),
        Cell(place_name(top.size, top.tokens), top.flops),
        numeric_cell(fixed(top.gap.width, 3), top.gap.width),
        Cell(NONE),
        numeric_cell(f"{signed(top.gap.mean, 3)}, its mean", abs(top.gap.mean)),
    ]]  # fmt: skip


def _more_runs_row(content: LadderReport, own: SchemeAnswer, more: MoreRuns) -> list[Cell]:
    helps = more.width_then < 0.98 * more.width_now
    return [
        scheme_cell(content, own.scheme),
        Cell(more.what, more.what),
        Cell(more.place.name, more.place.flops),
        numeric_cell(fixed(more.width_now, 3), more.width_now),
        numeric_cell(fixed(more.width_then, 3) if helps else "no narrower", more.width_then),
        numeric_cell(f"±{fixed(min(more.width_then, more.width_now) / 2, 3)}", more.width_then / 2),
    ]


def forecast_table(content: LadderReport) -> Table:
    """Forecasts of the held-out size beside what came."""
    places = gap_digits(content)
    columns = [
        Column("Scheme"), Column("Place"), Column(f"Forecast, {_level(content)}"), Column("Result", True),
        Column("Seeds", True), Column("Verdict"), Column("Forecast, simple law"), Column("Simple law says"),
    ]  # fmt: skip
    rows = [_forecast_row(content, entry, places) for entry in content.held_out]
    return Table("Forecast and result", columns, rows).filled()


def _forecast_row(content: LadderReport, entry: HeldOut, places: int) -> list[Cell]:
    tone = "" if entry.is_hit is None else "hit" if entry.is_hit else "failed"
    simple = {None: NONE, True: "hit", False: "miss"}[entry.is_simple_law_hit]
    own = next((own for own in content.answer.schemes if own.scheme == entry.scheme), None)
    came = cell_at(own, entry.place) if own else None
    return [
        scheme_cell(content, entry.scheme),
        Cell(entry.place.name, entry.place.flops, whole=True),
        interval_cell(entry.forecast, places),
        numeric_cell(signed(entry.measured, places), entry.measured),
        numeric_cell(str(entry.seeds) if entry.seeds else NONE, entry.seeds or None),
        Cell(hit_words(entry, places, came.reason if came else None), str(entry.is_hit), tone=tone),
        interval_cell(entry.simple_law, places),
        Cell(simple, simple),
    ]


def rate_table(content: LadderReport) -> Table:
    """Rates tried, the pick, and how it was carried to the other sizes."""
    columns = [
        Column("Scheme"), Column("Size"), Column("Tokens", True), Column("Rates tried"), Column("Pick", True),
        Column("Where it lies"), Column("At other sizes"),
    ]  # fmt: skip
    rules = {rule.scheme: rule for rule in content.design.rules}
    rows = [_rate_row(content, search, rules.get(search.scheme)) for search in content.design.rates]
    rows += [
        [scheme_cell(content, rule.scheme), *[Cell(NONE)] * 5, Cell(rule_words(rule))]
        for rule in content.design.rules
        if rule.scheme not in {search.scheme for search in content.design.rates}
    ]
    return Table("Learning rates", columns, rows).filled()


def _rate_row(content: LadderReport, search: RateSearchFacts, rule: RateRule | None) -> list[Cell]:
    tried = [_tried_words(entry) for entry in sorted(search.tried, key=lambda entry: entry.lr)]
    where = f"at the edge: {search.edge} tried" if search.edge else "inside" if search.pick is not None else NONE
    return [
        scheme_cell(content, search.scheme),
        Cell(search.size, search.size),
        numeric_cell(format_count(search.tokens), search.tokens),
        Cell(", ".join(tried)),
        numeric_cell(rate(search.pick), search.pick),
        Cell(where, where, tone="failed" if search.edge else ""),
        Cell(rule_words(rule) if rule else ""),
    ]


def _tried_words(entry: TriedRate) -> str:
    if entry.state != "done":
        return f"{rate(entry.lr)} {entry.state}"
    seeds = entry.confirmed + entry.unconfirmed
    more = f"; {entry.confirmed} of {counted(seeds, 'more seed')} trained" if seeds else ""
    return f"{rate(entry.lr)} ({fixed(entry.loss, 3)}{more})"


def rule_words(rule: RateRule) -> str:
    """How a rate is carried, in words."""
    return f"{_CARRIED[rule.carry]} ({rule.basis})" + (f": {rule.note}" if rule.note else "")


def lost_table(content: LadderReport) -> Table:
    """Runs that did not train."""
    rows = [[Cell(run.name, run.name), Cell(run.state, run.state, tone="failed"), Cell(run.reason)]
            for run in content.lost]  # fmt: skip
    return Table("Runs that did not train", [Column("Run"), Column("State"), Column("Reason")], rows).filled()


def assumption_table(content: LadderReport) -> Table:
    """Assumptions of the estimators."""
    rows = [[Cell(_ESTIMATORS.get(name, name)), Cell(minus(text))] for name, text in content.answer.priors.items()]
    return Table("Assumptions", [Column("What"), Column("Assumed")], rows, sortable=False)


def environment_table(content: LadderReport) -> Table:
    """Device, versions and data."""
    design = content.design
    known = {
        "date": design.date, "commit": design.commit, "device": design.device, "data": design.data,
        "validation": design.validation,
        "unique tokens": f"{design.unique_tokens:,}" if design.unique_tokens else None, "head": design.head,
    }  # fmt: skip
    facts = {name: value for name, value in known.items() if value}
    facts |= {f"{name} (runs)": text for name, text in design.versions.items()}
    facts |= {f"{name} (statistics)": text for name, text in content.answer.versions.items()}
    rows = [[Cell(name), Cell(text)] for name, text in facts.items()]
    return Table("Environment", [Column("What"), Column("Value")], rows, sortable=False)


def gap_digits(content: LadderReport) -> int:
    """Number of decimals of gaps: two digits of the narrowest interval, at most four."""
    found = (best_interval(cell) for own in content.answer.schemes for cell in own.cells)
    return min(4, decimals(interval.width for interval in found if interval is not None))


def scheme_cell(content: LadderReport, scheme: str) -> Cell:
    place = content.schemes.index(scheme) if scheme in content.schemes else None
    return Cell(scheme, scheme.lower(), scheme=place, whole=len(scheme) <= 24)


def interval_cell(interval: Interval | None, places: int) -> Cell:
    if interval is None:
        return Cell(NONE)
    return Cell(f"{signed(interval.low, places)} to {signed(interval.high, places)}", interval.mean, whole=True)


def times_cell(interval: Interval | None) -> Cell:
    """A multiplier with its interval."""
    if interval is None or not 0.1 < interval.low <= interval.high < 10.0:
        return Cell(NONE if interval is None else "not known")
    text = f"{fixed(interval.mean, 2)} ({fixed(interval.low, 2)} to {fixed(interval.high, 2)})"
    return Cell(text, interval.mean, whole=True)


def flops(value: float) -> str:
    """FLOPs in scientific notation: 8.5e16."""
    return rate(float(f"{value:.1e}"))


def _level(content: LadderReport) -> str:
    return f"{100 * content.answer.level:g} %"
