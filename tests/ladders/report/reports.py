"""Reports that several tests share: a whole ladder, and a table of losses without any design."""

from __future__ import annotations

from normlab.ladders.report import LadderReport
from tests.ladders.report import answers, synthetic


def full() -> LadderReport:
    """Four schemes on a grid of 4 sizes and 3 budgets, with forecast, rates and a lost run."""
    rows = synthetic.rows()
    return LadderReport(rows, answers.answer(rows), synthetic.design())


def table_only() -> LadderReport:
    """Two schemes on a path with one seed: too small for a fit, no targets, no design."""
    rows = synthetic.rows(
        schemes=("pre", "peri"), sizes=("4x256", "6x384", "8x512"), budgets=(118_000_000,), seeds=1, lost=False
    )
    return LadderReport(rows, answers.answer(rows, targets=False, fitted=False))


def path() -> LadderReport:
    """Four sizes, each on its own budget, with a fit and targets but without a design."""
    kept = dict(zip(synthetic.SIZES, (29_500_000, 59_000_000, 118_000_000, 236_000_000), strict=True))
    rows = [
        row
        for row in synthetic.rows(schemes=("pre", "peri", "geonorm"), budgets=tuple(kept.values()), lost=False)
        if kept[row.size] == row.tokens
    ]
    return LadderReport(rows, answers.answer(rows))
