"""The studies of this repository: every file loads, plans, and names in its rules only what it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.studies.run import _check_rules, configurations, study_plan
from normlab.studies.study import find_studies, load_study

FOLDER = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", find_studies(FOLDER))
def test_it_can_be_planned(name):
    study = load_study(name, FOLDER)
    sizes = study_plan(study)
    assert sum(size.runs for size in sizes) > 0
    _check_rules(study, configurations(study))
    named = {arm for claim in study.claims for scheme in claim.rule.schemes if (arm := scheme.partition("@")[2])}
    assert named <= {*study.arms}


def test_the_cost_that_is_stated_counts_the_runs():
    for name, runs in (("geonorm-clamp-decay", 60), ("spannorm-depth-128", 30), ("peri-step", 36), ("high-rates", 135)):
        study = load_study(name, FOLDER)
        assert sum(size.runs for size in study_plan(study)) == runs
        assert f"{runs} runs" in study.cost
