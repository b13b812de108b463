"""The description of a ladder: its rates, their rules, its cautions, its lost runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from normlab.ladders.description import design_of
from normlab.ladders.ladder import open_data
from normlab.ladders.plan import LadderPlan
from normlab.ladders.run import LadderRun
from tests.ladders.small import STEP, configuration, trained


def test_rates_are_at_the_places_of_the_cells(text: Path) -> None:
    """A budget that is no multiple of a step is trained to the end of its last step, and has one name on the page."""
    odd = (10 * STEP - 1, 20 * STEP - 1)
    data, config = open_data(configuration(text, budgets=odd, lrs=(1e-2, 2e-2)), progress=False)
    plan = LadderPlan(config)
    design = design_of(plan, trained(plan, lambda run: 3.0), data, ())
    cells = {(cell.size, cell.tokens) for cell in design.cells}
    assert {cell.tokens for cell in design.cells} == {10 * STEP, 20 * STEP}
    assert {(search.size, search.tokens) for search in design.rates} <= cells


@pytest.mark.parametrize(
    ("changes", "basis"),
    [
        ({}, "derived over width; depth 1 to 2 without a rule: a hypothesis"),
        ({"sizes": ("1x8", "1x16", "1x32")}, "derived"),
        ({"carry": "width+depth"}, "derived"),
        ({"carry": "none"}, "hypothesis"),
    ],
)
def test_a_rule_is_called_derived_where_it_covers_all_that_differs(
    text: Path, changes: dict[str, Any], basis: str
) -> None:
    data, config = open_data(configuration(text, **changes), progress=False)
    design = design_of(LadderPlan(config), [], data, ())
    assert {rule.basis for rule in design.rules if rule.scheme == "pre"} == {basis}


def test_a_rate_that_was_never_tried_is_a_caution_and_its_rule_is_fitted(text: Path) -> None:
    def loss(run: LadderRun) -> float:
        best = 4e-3 if str(run.rung.size) == "1x8" else 8e-3
        return 3.0 + 0.1 * math.log2(run.base_lr / best) ** 2

    data, config = open_data(configuration(text, sizes=("1x8", "1x16", "1x64"), lrs="auto"), progress=False)
    plan = LadderPlan(config)
    design = design_of(plan, trained(plan, loss), data, ())
    assert {rule.basis for rule in design.rules} == {"fitted"}
    said = "The rate of pre at 1x64 (3.2e-2) lies outside of all that were tried for it (2e-3 to 1.6e-2)."
    assert said in design.cautions


def test_a_run_that_is_found_stuck_at_its_end_has_its_reason_on_the_page(text: Path) -> None:
    data, config = open_data(configuration(text), progress=False)
    plan = LadderPlan(config)
    stuck = {"stuck": True, "stuck_at": 20, "unigram_entropy": 3.02}
    rows = [one | stuck if one["scheme"] == "peri" else one for one in trained(plan, lambda run: 3.05)]
    lost = design_of(plan, rows, data, ()).lost
    assert lost
    assert {(own.state, own.reason) for own in lost} == {("stuck", "stuck at the unigram entropy (3.02)")}
