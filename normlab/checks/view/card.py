"""The card of a check on a terminal: headline, verdicts, profiles as sparklines, remedies."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normlab.checks.judge.verdict import Level, Verdict
from normlab.checks.result import Check
from normlab.checks.view.side_by_side import Against
from normlab.checks.view.summary import (  # fmt: skip
    MARKS,
    UNMEASURED,
    causes,
    caveats,
    headline,
    is_open,
    mark,
    open_words,
    reason,
    subtitle,
)
from normlab.pages.numbers import duration
from normlab.probes.profile import Number
from normlab.utils.spaced import evenly_spaced

STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}

CURVES = {"hidden size": "rms", "gradient": "grad_h", "token cosine": "cos", "turn per block": "ang"}
"""The profiles on a card: label → field of `Profile`."""

_NARROW = 84
"""Terminal width below which a verdict's text goes under its name."""
_REMEDIES = 6
"""Number of remedies shown, the cheapest ones; the page has all."""

_BARS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_TOO_STEEP = 3.0
"""Curves whose largest value is more than so many times the smallest are drawn on a logarithmic scale."""


def show(result: Check | Against, console: Console | None = None) -> None:
    """Print the card of a check, or of two side by side."""
    console = console or Console()
    make = card if isinstance(result, Check) else card_of_two
    console.print(make(result, console.width), highlight=False)  # type: ignore[arg-type]


def text(result: Check | Against, width: int = 110) -> str:
    """The card as plain text."""
    page = io.StringIO()
    show(
        result,
        Console(
            file=page, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
        ),
    )
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def card(check: Check, width: int = 110) -> RenderableType:
    """The card for a terminal of so many columns."""
    parts: list[RenderableType] = [_title(check), *_notes(check)]
    parts += [Text(), headline_text(headline(check), check.level), *map(Text, causes(check)), Text()]
    parts += [verdict_table(check.verdicts, width), Text(), profile_table(check, width)]
    parts += [Text(), *remedy_lines(check.remedies)] if check.remedies else []
    parts += [Text(), Text(_foot(check), style="dim")]
    return Padding(Group(*parts), (0, 1))


def card_of_two(pair: Against, width: int = 110) -> RenderableType:
    """Two checks for a terminal of so many columns."""
    parts: list[RenderableType] = []
    for check in pair.checks:
        parts += [_title(check), *_notes(check)]
    parts += [Text(), headline_text(pair.headline, pair.level), Text(), difference_table(pair), Text()]
    for check in pair.checks:
        parts += [Text(check.target.name, style="bold"), profile_table(check, width), Text()]
    parts += [*remedy_lines(pair.first.remedies), Text()] if pair.first.remedies else []
    parts += [Text(f"{check.target.name}: {_foot(check)}", style="dim") for check in pair.checks]
    return Padding(Group(*parts), (0, 1))


def difference_table(pair: Against) -> RenderableType:
    """Key numbers of both designs, and the verdicts that differ or are not fine."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for check in pair.checks:
        table.add_column(Text(check.target.name), header_style="bold")
    for name, values in pair.figures.items():
        table.add_row(name, *("–" if value is None else f"{value:.3g}" for value in values))
    for difference in pair.differences:
        if not difference.is_fine:
            table.add_row(difference.name, *map(_finding, (difference.first, difference.second)))
    fine = [difference.name for difference in pair.differences if difference.is_fine]
    return Group(table, Text(f"alike and fine in both: {', '.join(fine)}", style="dim")) if fine else table


def headline_text(words: str, level: Level) -> Text:
    """The headline with its mark."""
    return Text(f"{MARKS[level]} {words}", style=f"bold {STYLES[level]}")


def verdict_table(verdicts: Iterable[Verdict], width: int) -> RenderableType:
    """One row for each verdict that was reached, failures first; the others in one line."""
    verdicts = list(verdicts)
    rows = [verdict for level in ("fail", "warn", "ok") for verdict in verdicts if verdict.level == level]
    table = Table.grid(padding=(0, 1), collapse_padding=True)
    for verdict in rows:
        if not is_open(verdict):
            table.add_row(*(_wide(verdict) if width >= _NARROW else _stacked(verdict)))
    missing = [verdict for verdict in verdicts if is_open(verdict)]
    if not missing:
        return table
    return Group(table, Text(f"· not measured: {'; '.join(map(open_words, missing))}", style="dim"))


def profile_table(check: Check, width: int) -> RenderableType:
    """The deepest stack from its first block to its last, before and after the burst."""
    looks = [check.profile(when) for when in check.ladder.snapshots]
    room = max(8, min(32, (width - 16) // len(looks) - 22))
    table = Table.grid(padding=(0, 2))
    table.add_row("", *(Text(f"step {look.step}, {look.depth} blocks", style="dim") for look in looks))
    for label, name in CURVES.items():
        curves = [getattr(look, name) for look in looks]
        if any(x is not None for curve in curves for x in curve):
            lines = zip(sparks(curves, room), curves, strict=True)
            table.add_row(label, *(Text(f"{line} {ends(curve)}") for line, curve in lines))
    return table


def ends(curve: Sequence[Number]) -> str:
    """First and last number of a profile, as text."""
    return " → ".join("not finite" if x is None else f"{x:.3g}" for x in (curve[0], curve[-1]))


def remedy_lines(remedies: Sequence[str]) -> list[RenderableType]:
    """The remedies as lines, cheapest first."""
    table = Table.grid(padding=(0, 1))
    for place, words in enumerate(remedies[:_REMEDIES], 1):
        table.add_row(f" {place}.", Text(words))
    if len(remedies) > _REMEDIES:
        table.add_row(" …", Text(f"and {len(remedies) - _REMEDIES} more"))
    return [Text("To try, cheapest first", style="bold"), table]


def _title(check: Check) -> Text:
    return Text.assemble((check.target.name, "bold"), "  ", (subtitle(check), "dim"))


def _notes(check: Check) -> list[RenderableType]:
    return [Text(f"note: {line}", style="italic") for line in caveats(check)]


def _finding(verdict: Verdict | None) -> Text:
    if verdict is None or is_open(verdict):
        return Text(f"{UNMEASURED} not measured", style="dim")
    return Text(f"{mark(verdict)} {verdict.finding}", style=STYLES[verdict.level])


def _wide(verdict: Verdict) -> list[Text]:
    style = STYLES[verdict.level]
    name = Text(verdict.name, style="bold", no_wrap=True)
    return [Text(mark(verdict), style=style), name, Text(verdict.finding, style=style, no_wrap=True), _reason(verdict)]


def _stacked(verdict: Verdict) -> list[Text]:
    style = STYLES[verdict.level]
    words = Text.assemble((verdict.name, "bold"), ": ", (verdict.finding, style), "\n", reason(verdict))
    return [Text(mark(verdict), style=style), words]


def _reason(verdict: Verdict) -> Text:
    return Text(reason(verdict), style="dim" if verdict.level == "ok" else "")


def _foot(check: Check) -> str:
    depths = ", ".join(map(str, check.ladder.depths))
    seeds = len({profile.seed for profile in check.ladder.profiles})
    return f"{depths} blocks, {seeds} seed{'s' if seeds > 1 else ''}, {duration(check.seconds)}"


def sparks(curves: Sequence[Sequence[Number]], width: int) -> list[str]:
    """One line of at most `width` characters for each curve, all on the same scale; a gap where there is no number."""
    cut = [[curve[place] for place in evenly_spaced(len(curve), width)] for curve in curves]
    known = [x for curve in cut for x in curve if x is not None]
    if not known:
        return [_GAP * len(curve) for curve in cut]
    steep = min(known) > 0.0 and max(known) > _TOO_STEEP * min(known)
    low, high = (math.log(x) if steep else x for x in (min(known), max(known)))
    return ["".join(_bar(x, low, high, steep) for x in curve) for curve in cut]


def _bar(x: Number, low: float, high: float, steep: bool) -> str:
    if x is None:
        return _GAP
    share = ((math.log(x) if steep else x) - low) / (high - low) if high > low else 0.5
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
