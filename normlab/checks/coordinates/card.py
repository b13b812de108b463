"""The card of a coordinate check on a terminal: headline, and a table of exponents by module for each axis."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normlab.checks.coordinates.records import Axis, CoordinateCheck, Finding, Trend
from normlab.checks.coordinates.words import exponent, finding, headline, labels, level, rule_words, sentences, sizes_of
from normlab.checks.view.card import STYLES, headline_text
from normlab.pages.numbers import duration, rate
from normlab.utils.text import counted

_STYLE: dict[Finding, str] = {
    "flat": STYLES["ok"],
    "as its size": STYLES["ok"],
    "constant": "dim",
    "unclear": STYLES["warn"],
    "grows": STYLES["fail"],
    "shrinks": STYLES["fail"],
    "not finite": STYLES["fail"],
}


def show(check: CoordinateCheck, console: Console | None = None) -> None:
    """Print the card."""
    console = console or Console()
    console.print(card(check), highlight=False)


def text(check: CoordinateCheck, width: int = 110) -> str:
    """The card as plain text."""
    page = io.StringIO()
    show(check, Console(file=page, width=width, color_system=None, force_terminal=False, legacy_windows=False))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def card(check: CoordinateCheck) -> RenderableType:
    """The card as a rich renderable."""
    parts: list[RenderableType] = [Text.assemble((check.target.name, "bold"), ("  coordinate check", "dim"))]
    parts += [Text(f"note: {line}", style="italic") for line in (*check.target.notes, *check.notes)]
    parts += [Text(), headline_text(headline(check), level(check)), Text()]
    for axis in check.axes:
        title = Text.assemble((f"Over {axis.name}", "bold"), (f"  {sizes_of(axis)}, {rule_words(axis, check)}", "dim"))
        parts += [title, axis_table(axis, check.steps), Text()]
    parts += [Text(line) for line in sentences(check)]
    parts += [Text(), *(Text(line, style="dim") for line in _foot(check))]
    return Padding(Group(*parts), (0, 1))


def axis_table(axis: Axis, steps: int) -> Table:
    """The exponents of every module over one axis."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # Folded on a narrow terminal: what is cut off tells modules apart.
    table.add_column("module", overflow="fold")
    last = [f"change, step {steps}"] if steps > 1 else []
    for title in ("size, step 0", "change, step 1", *last):
        table.add_column(title, justify="right")
    table.add_column("finding")
    names = labels(trend.module for trend in axis.trends)
    for trend in axis.trends:
        table.add_row(Text(names[trend.module]), *_exponents(trend, steps), Text(finding(trend), _tone(trend)))
    return table


def _exponents(trend: Trend, steps: int) -> list[Text]:
    fits = [trend.start, trend.first, trend.last] if steps > 1 else [trend.start, trend.first]
    return [Text(exponent(fit)) for fit in fits]


def _tone(trend: Trend) -> str:
    return _STYLE["grows"] if trend.size in ("grows", "not finite") else _STYLE[trend.change]


def _foot(check: CoordinateCheck) -> list[str]:
    return [
        f"p of value ∝ size^p, ± half its 95 % interval over seeds; |p| ≤ {check.threshold:g} is flat",
        f"{counted(check.steps, 'step')} on one batch at rate {rate(check.lr)}, {counted(check.seeds, 'seed')}, "
        f"{duration(check.seconds)}",
    ]
