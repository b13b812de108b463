"""The studies of this repository: every file loads, plans, and names in its rules only what it runs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from normlab.studies.cells import cell_name
from normlab.studies.headlines import RESULTS_TESTED
from normlab.studies.run import _check_rules, configurations, ladders, study_plan
from normlab.studies.study import find_studies, load_study

FOLDER = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", find_studies(FOLDER))
def test_it_can_be_planned(name):
    study = load_study(name, FOLDER)
    sizes = study_plan(study)
    assert study.kind == "rows" or sum(size.runs for size in sizes) > 0
    _check_rules(study, configurations(study) or ladders(study))
    named = {arm for claim in study.claims for scheme in claim.rule.schemes if (arm := scheme.partition("@")[2])}
    assert named <= {*study.arms}
    assert all(claim.number is not None and claim.rule.sentence for claim in study.claims)


def test_every_headline_result_has_a_study():
    claims = [claim for name in find_studies(FOLDER) for claim in load_study(name, FOLDER).claims]
    assert {claim.number for claim in claims} == {*RESULTS_TESTED}


def test_rules_name_cells_that_the_ladder_has():
    study = load_study("ladder", FOLDER)
    cells = {
        cell_name(str(rung.size), budget)
        for config in ladders(study).values()
        for rung in config.rungs
        for budget in rung.budgets
    }
    for claim in study.claims:
        patterns = [getattr(claim.rule, "cell", "*"), *claim.rule.arms]
        for pattern in patterns:
            assert any(fnmatchcase(cell, pattern.removeprefix("rates,")) for cell in cells), (claim.name, pattern)


def test_the_cost_that_is_stated_counts_the_runs():
    for name, runs in (("geonorm-clamp-decay", 60), ("spannorm-depth-128", 30), ("high-rates", 135), ("depth-use", 36)):
        study = load_study(name, FOLDER)
        assert sum(size.runs for size in study_plan(study)) == runs
        assert f"{runs} runs" in study.cost
