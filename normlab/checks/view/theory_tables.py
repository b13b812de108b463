"""Tables of a check's page on theory beside measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from normlab.checks.judge.blame import blocks
from normlab.checks.result import Check
from normlab.checks.theory.records import ScaleRow, Theory, TheoryLook
from normlab.checks.view.tables import number, owned
from normlab.pages.numbers import NONE, fixed
from normlab.pages.tables import Cell, Table, columns, numeric_cell

_SEGMENTS = 6
"""Largest number of segments of a bound that are listed; a single one is described by the certificate."""


def theory_table(checks: Sequence[Check]) -> Table:
    """Table of predictions, proven bounds and measurements."""
    known = [(check, check.theory) for check in checks if check.theory]
    rows = [(check, [Cell(words or NONE) for words in row]) for check, theory in known for row in _rows(check, theory)]
    return owned(checks, "Theory beside measurement", columns("Of", "Theory", "Measured"), rows, sortable=False)


def scale_table(checks: Sequence[Check]) -> Table:
    """The scale test, branch by branch."""
    rows = [(check, _scale(row)) for check in checks if check.theory for row in check.theory.scale_test]
    note = "0: the gradient does not follow the weights (as under Peri-LN); 1: it grows with them (as under Pre-LN)."
    return owned(checks, "Scale test", columns("Block#", "Branch", "Slope#", "Finding"), rows, note=note)


def jacobian_table(checks: Sequence[Check]) -> Table:
    """How much each branch could multiply a gradient."""
    known = [(check, check.theory) for check in checks if check.theory]
    rows = [
        (check, [number(float(look.step)), number(float(row.block)), Cell(row.branch, row.branch), number(row.norm)])
        for check, theory in known
        for look in theory.looks
        for row in look.jacobians
    ]
    note = "The largest singular value of a branch's derivative at a real state, by power iteration."
    return owned(checks, "Jacobians of the branches", columns("Step#", "Block#", "Branch", "‖J‖#"), rows, note=note)


def _rows(check: Check, theory: Theory) -> list[tuple[str, str, str]]:
    """Laws and certificate as far as they are stated; everything else as far as it was seen."""
    stated = [
        ("Size of the state", theory.forward, check.verdict("forward").words),
        ("Gradient", theory.backward, check.verdict("backward").words),
        ("Certificate", theory.certificate, _looks(theory, _use, "of the bound used after the last block")),
        *_segments(theory),
    ]
    seen = [
        ("Length of a token", "kept by every block", _looks(theory, _drift, "largest relative change")),
        ("Angles", "never beyond the clamp", _looks(theory, _clamped, "of the tokens clamped in the worst block")),
        ("Mixing", "doubly stochastic matrices have a gain of 1", _looks(theory, _mixing, "by the product of all")),
        ("Slopes Λ", "the largest RMS that a branch can return for a normalised input", theory.slopes),
        ("Jacobians", "the gradient's gain: Σ log χ ≤ Σ log(1 + ‖J‖) over the branches", theory.jacobians),
        ("Scale test", "a branch's gradient against the size of its last matrix", theory.scale),
    ]
    return [row for row in stated if row[1]] + [row for row in seen if row[2]]


def _segments(theory: Theory) -> list[tuple[str, str, str]]:
    if not 1 < len(theory.segments) <= _SEGMENTS:
        return []
    named = [blocks(range(part.first, part.last + 1), theory.depth).capitalize() for part in theory.segments]
    return [(name, part.words, NONE) for name, part in zip(named, theory.segments, strict=True)]


def _looks(theory: Theory, read: Callable[[TheoryLook], str | None], label: str) -> str:
    """The entries of each snapshot, with its step; empty if none has any."""
    found = [f"{words} at step {look.step}" for look in theory.looks if (words := read(look))]
    return f"{', '.join(found)} {label}" if found else ""


def _use(look: TheoryLook) -> str | None:
    return None if look.use is None else f"{100 * look.use:.3g} %"


def _drift(look: TheoryLook) -> str | None:
    return None if look.drift is None else f"{look.drift:.2g}"


def _clamped(look: TheoryLook) -> str | None:
    shares = [share for share in look.clamped if share is not None]
    return f"{100 * max(shares):.3g} %" if shares else None


def _mixing(look: TheoryLook) -> str | None:
    if look.mixing is None:
        return None
    return f"streams × {look.mixing_forward:.3g}, gradients × {look.mixing_backward:.3g}"


def _scale(row: ScaleRow) -> list[Cell]:
    block, slope = numeric_cell(str(row.block), row.block), numeric_cell(fixed(row.slope, 3), row.slope)
    return [block, Cell(row.branch, row.branch), slope, Cell(row.finding, row.finding)]
