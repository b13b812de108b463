"""Tables of a check's page; with two checks every row names, and shows in colour, its check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from normlab.checks.judge import growth_laws
from normlab.checks.judge.verdict import Verdict, mean
from normlab.checks.ladder_records import StepRung
from normlab.checks.result import Check
from normlab.checks.view.plots import fitted_from
from normlab.checks.view.side_by_side import Against
from normlab.checks.view.summary import is_open, mark
from normlab.pages.numbers import NONE, duration, fixed, format_count, join_names, rate
from normlab.pages.tables import Cell, Column, Table, columns, flatten, numeric_cell
from normlab.probes.profile import Number, Profile, When
from normlab.probes.start import Start

Row = tuple[Check, list[Cell]]
"""(check, cells of its row)."""


def number(value: Number) -> Cell:
    """A cell with three significant digits that sorts by value."""
    return numeric_cell(NONE if value is None else f"{value:.3g}".replace("-", "−"), value)


def owned(
    checks: Sequence[Check],
    caption: str,
    titles: Sequence[Column],
    rows: Iterable[Row],
    *,
    sortable: bool = True,
    note: str = "",
) -> Table:
    """The table; with two checks a first column names the check of each row."""
    if len(checks) == 1:
        return Table(caption, titles, [cells for _, cells in rows], sortable, note)
    places = {id(check): place for place, check in enumerate(checks)}
    whose = [
        [Cell(check.target.name, check.target.name.lower(), scheme=places[id(check)]), *cells] for check, cells in rows
    ]
    return Table(caption, [Column("Design"), *titles], whose, sortable, note)


def start_table(checks: Sequence[Check]) -> Table:
    """First loss and probability of the token read, before any training."""
    titles = columns("Model", "Head", "Width#", "Vocabulary#", "First loss#", "Limit#", "ln V#", "Token read#")
    rows = [(check, _start(check, start)) for check in checks for start in check.starts]
    note = (
        "Nats for targets drawn evenly. The limit is ln V, what random logits cost (half the width times the head's "
        f"variance, at most ln V) and {checks[0].thresholds.start_margin:g}; the token just read must have less than "
        f"{checks[0].thresholds.start_read:g}."
    )
    if any(not start.judged for check in checks for start in check.starts):
        note += " In brackets: what a tied head would make of the same states."
    return owned(checks, "Before the first step", titles, rows, sortable=False, note=note)


def _start(check: Check, start: Start) -> list[Cell]:
    head = "tied" if start.tied else "its own"
    numbers = (start.loss, start.limit(check.thresholds.start_margin), start.guess)
    return [
        Cell(start.name),
        Cell(head if start.judged else f"({head})"),
        numeric_cell(str(start.width), start.width),
        numeric_cell(str(start.vocabulary), start.vocabulary),
        *(numeric_cell(fixed(value, 2), value) for value in numbers),
        number(start.read),
    ]


def ladder_table(checks: Sequence[Check]) -> Table:
    """Every rung of the depth ladder."""
    titles = columns(
        "Blocks#",
        "Training",
        "RMS#",
        "First / last gradient#",
        "Growth rate × depth#",
        "Token cosine#",
        "Rank#",
        "Loss#",
    )
    rows = [
        (check, _rung(check.ladder.at(depth, when)))
        for check in checks
        for depth in check.ladder.depths
        for when in check.ladder.snapshots
        if check.ladder.at(depth, when)
    ]
    return owned(checks, "Depth ladder", titles, rows)


def _rung(profiles: Sequence[Profile]) -> list[Cell]:
    """One depth at one snapshot, means over seeds."""
    first = profiles[0]
    slope = mean([growth_laws.kappa(profile) for profile in profiles])
    rms, cosine, rank = (mean([getattr(p, name)[-1] for p in profiles]) for name in ("rms", "cos", "erank"))
    loss = mean([profile.loss for profile in profiles])
    return [
        numeric_cell(str(first.depth), first.depth),
        Cell(f"{first.when}, step {first.step}", first.when),
        number(rms),
        number(growth_laws.gradient_gain(profiles)),
        number(None if slope is None else slope * first.depth),
        numeric_cell(fixed(cosine, 3), cosine),
        numeric_cell(fixed(rank, 1), rank),
        numeric_cell(fixed(loss, 3), loss),
    ]


def law_table(checks: Sequence[Check]) -> Table:
    """The fitted laws with their intervals."""
    titles = columns("Law", "Training", "Exponent#", "Interval", "From", "Class")
    rows = [(check, row) for check in checks for when in check.ladder.snapshots for row in _laws(check, when)]
    note = (
        "Exponents are of the RMS: 1 in RMS is 2 in variance. Intervals are Student's, at 95 %, over seeds or depths; "
        "with one seed a doubling of depth has none."
    )
    return owned(checks, "Fitted laws", titles, rows, note=note)


def _laws(check: Check, when: When) -> list[list[Cell]]:
    forward = growth_laws.forward_law(check.ladder, when, check.thresholds)
    backward = growth_laws.backward_law(check.ladder, when, check.target.depth, check.thresholds)
    pair = f"{' to '.join(map(str, forward.depths))} blocks" if forward.depths else NONE
    every = f"{fitted_from(check, when)} to {check.ladder.deepest(when)[0].depth} blocks"
    return [
        _law("RMS of the state ∝ L^p", when, forward.p, pair, forward.name),
        _law("Gradient of the first block over the last's ∝ L^p", when, backward.fit, every, backward.name),
    ]


def _law(title: str, when: When, fit: growth_laws.Fit | None, source: str, name: str) -> list[Cell]:
    interval = NONE if fit is None or fit.low is None else f"{fixed(fit.low, 2)} to {fixed(fit.high, 2)}"
    p = None if fit is None else fit.exponent
    return [Cell(title), Cell(when), numeric_cell(fixed(p, 2), p), Cell(interval, whole=True), Cell(source), Cell(name)]


def width_table(checks: Sequence[Check]) -> Table:
    """The width ladder."""
    rows = [
        (check, _width(rung.width, rung.ladder.deepest(when)))
        for check in checks
        for rung in check.widths or ()
        for when in rung.ladder.snapshots
    ]
    return owned(
        checks,
        "Width ladder",
        columns("Width#", "Blocks#", "Training", "RMS#", "First / last gradient#", "Loss#"),
        rows,
    )


def _width(width: int, profiles: Sequence[Profile]) -> list[Cell]:
    size, loss = mean([p.rms[-1] for p in profiles]), mean([p.loss for p in profiles])
    depth = profiles[0].depth
    cells = [numeric_cell(str(width), width), numeric_cell(str(depth), depth), Cell(profiles[0].when)]
    return [*cells, number(size), number(growth_laws.gradient_gain(profiles)), number(loss)]


def step_table(checks: Sequence[Check]) -> Table:
    """The residual-step ladder."""
    numbers = [f"{name}, {when}#" for name in ("RMS", "G", "Loss") for when in get_args(When)]
    rows = [(check, _step(rung)) for check in checks for rung in check.steps or ()]
    return owned(checks, "Residual-step ladder", columns("Δt#", "Blocks#", *numbers), rows)


def _step(rung: StepRung) -> list[Cell]:
    values = [getattr(look, name) for name in ("rms", "G", "loss") for look in (rung.before, rung.after)]
    return [number(rung.step), numeric_cell(str(rung.depth), rung.depth), *map(number, values)]


def rate_table(checks: Sequence[Check]) -> Table:
    """Results of the learning-rate ladder."""
    titles = columns("Usable rates", "Decades#", "Largest stable rate#", "Sensitivity#", "Reference loss#", "From")
    rows = [(check, _rates(check)) for check in checks if check.rates is not None]
    return owned(checks, "Learning rates", titles, rows, sortable=False)


def _rates(check: Check) -> list[Cell]:
    found = check.rates
    if found is None:
        return []
    usable = f"{rate(found.usable[0])} to {rate(found.usable[1])}" if found.usable else "none"
    return [
        Cell(usable),
        numeric_cell(fixed(found.decades, 1), found.decades),
        numeric_cell(rate(found.lr_max), found.lr_max),
        number(found.sens),
        number(found.reference),
        Cell(found.reference_from),
    ]


def difference_table(pair: Against) -> Table:
    """Key numbers of both designs, and the verdicts that differ or are not fine."""
    rows = [[Cell(name), *(Cell(number(value).text) for value in values)] for name, values in pair.figures.items()]
    rows += [[Cell(d.name), *map(_finding, (d.first, d.second))] for d in pair.differences if not d.is_fine]
    fine = [difference.name for difference in pair.differences if difference.is_fine]
    note = f"Alike and fine in both: {join_names(fine)}." if fine else ""
    return Table("Side by side", columns("", *_names(pair.checks)), rows, sortable=False, note=note)


def _finding(verdict: Verdict | None) -> Cell:
    if verdict is None or is_open(verdict):
        return Cell("not measured", tone="not-judged")
    tones = {"ok": "better", "warn": "", "fail": "worse"}
    return Cell(f"{mark(verdict)} {verdict.finding}", tone=tones[verdict.level])


def config_table(checks: Sequence[Check]) -> Table:
    """The options of each check."""
    tables = [flatten(check.config) for check in checks]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = [[Cell(name), *(Cell(table.get(name, NONE)) for table in tables)] for name in names]
    return Table("Configuration", columns("Option", *_names(checks)), rows, sortable=False)


def environment_table(checks: Sequence[Check]) -> Table:
    """Versions, time and size of each check."""
    names = list(dict.fromkeys(name for check in checks for name in check.versions))
    rows = [[Cell(name), *(Cell(check.versions.get(name, NONE)) for check in checks)] for name in names]
    rows.append([Cell("time"), *(Cell(duration(check.seconds)) for check in checks)])
    rows.append([Cell("parameters"), *(Cell(format_count(check.target.parameters)) for check in checks)])
    return Table("Environment", columns("What", *_names(checks)), rows, sortable=False)


def _names(checks: Sequence[Check]) -> list[str]:
    """The column title of each check: its name, or nothing if there is only one."""
    return [check.target.name for check in checks] if len(checks) > 1 else ["Value"]
