"""How each cell was trained, as a grid of sizes and budgets: tokens per parameter, epochs, steps, embedding share."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.ladders.report.content import LadderCell, LadderReport
from normlab.ladders.report.tables import flops
from normlab.ladders.statistics.answer import FEW_STEPS
from normlab.pages.numbers import NONE, format_count, ratio
from normlab.pages.tables import Cell, Column, Table, numeric_cell


@dataclass(frozen=True)
class TrainedCell:
    """One cell of the grid in words."""

    tokens: str
    facts: tuple[tuple[str, str], ...]
    is_short: bool
    is_held_out: bool


@dataclass(frozen=True)
class TrainedSize:
    """One line of the grid; None where a size was not trained on a budget of the grid."""

    label: str
    about: str
    cells: tuple[TrainedCell | None, ...]


def training_grid(content: LadderReport) -> list[TrainedSize]:
    """One line for each size: with a column for every budget on a grid, without gaps on a path."""
    return [TrainedSize(size, _about(content, size), tuple(_line(content, size))) for size in content.sizes]


def _line(content: LadderReport, size: str) -> list[TrainedCell | None]:
    own = {cell.tokens: cell for cell in content.cells if cell.size == size}
    budgets = content.budgets if content.answer.kind == "grid" else sorted(own)
    return [_trained(own[tokens]) if tokens in own else None for tokens in budgets]


def _trained(cell: LadderCell) -> TrainedCell:
    known = [
        ("tokens a parameter", ratio(cell.tokens_per_parameter)),
        ("steps", NONE if cell.steps is None else f"{cell.steps:,}"),
        ("tokens a step", NONE if cell.batch is None else f"{cell.batch:,}"),
        ("epochs", NONE if cell.epochs is None else f"{cell.epochs:.2g}"),
        ("FLOPs", flops(cell.flops)),
    ]
    facts = tuple((name, text) for name, text in known if text != NONE)
    return TrainedCell(f"{format_count(cell.tokens)} tokens", facts, cell.is_short, cell.is_held_out)


def _about(content: LadderReport, size: str) -> str:
    facts = content.design.size_facts(size)
    parameters = next(cell.parameters for cell in content.cells if cell.size == size)
    parts = [f"{format_count(parameters)} parameters"]
    if facts is not None and facts.depth and facts.width and size != f"{facts.depth}x{facts.width}":
        parts.insert(0, f"{facts.depth} × {facts.width}")
    if facts is not None and facts.embedding_share is not None:
        parts.append(f"{100 * facts.embedding_share:.0f}\u00a0% embedding")
    trained = len({row.seed for row in content.rows if row.size == size and row.is_usable})
    planned = facts.seeds if facts is not None and facts.seeds is not None else trained
    of = f" of {planned}" if trained < planned else ""
    parts.append("1 seed" if planned == 1 else f"{trained}{of} seeds")
    return ", ".join(parts)


def training_table(content: LadderReport) -> Table:
    """The same as a table, for Markdown."""
    columns = [
        Column("Size"), Column("Parameters", True), Column("Embedding", True), Column("Tokens", True),
        Column("Tokens a parameter", True), Column("Epochs", True), Column("Steps", True), Column("FLOPs", True),
        Column("Remarks"),
    ]  # fmt: skip
    return Table("Training", columns, [_row(content, cell) for cell in content.cells]).filled()


def _row(content: LadderReport, cell: LadderCell) -> list[Cell]:
    facts = content.design.size_facts(cell.size)
    share = facts.embedding_share if facts else None
    remarks = [f"fewer than {FEW_STEPS:,} steps"] * cell.is_short + ["held out"] * cell.is_held_out
    return [
        Cell(cell.size, cell.parameters),
        numeric_cell(format_count(cell.parameters), cell.parameters),
        numeric_cell(NONE if share is None else f"{100 * share:.0f} %", share),
        numeric_cell(format_count(cell.tokens), cell.tokens),
        numeric_cell(ratio(cell.tokens_per_parameter), cell.tokens_per_parameter),
        numeric_cell(NONE if cell.epochs is None else f"{cell.epochs:.2g}", cell.epochs),
        numeric_cell(NONE if cell.steps is None else f"{cell.steps:,}", cell.steps),
        numeric_cell(flops(cell.flops), cell.flops),
        Cell(", ".join(remarks)),
    ]
