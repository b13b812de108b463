"""The studies of this repository: every file loads, plans, and names in its rules only what it runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from fnmatch import fnmatchcase
from pathlib import Path

from normlab.ladders.places import places
from normlab.studies.cells import cell_name
from normlab.studies.headlines import RESULTS_TESTED
from normlab.studies.rules.base import VALUE
from normlab.studies.rules.change import ChangeRule
from normlab.studies.rules.difference import DifferenceRule
from normlab.studies.rules.order import OrderRule
from normlab.studies.run import check_rules, comparison_configs, ladder_configs, study_plan
from normlab.studies.study import RESULTS, find_studies, load_study
from normlab.train.monitor.summary import summarise
from normlab.train.plan import Milestones
from tests.matrix import parametrize

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "studies"


@functools.cache
def planned_runs(name: str) -> int:
    """Planning a ladder takes seconds."""
    return sum(size.runs for size in study_plan(load_study(name, FOLDER)))


@parametrize("name", find_studies(FOLDER), quick={*find_studies(FOLDER)} - {"ladder"})
def test_it_can_be_planned(name):
    study = load_study(name, FOLDER)
    assert study.kind == "rows" or planned_runs(name) > 0
    check_rules(study, comparison_configs(study) or ladder_configs(study))
    named = {arm for claim in study.claims for scheme in claim.rule.schemes if (arm := scheme.partition("@")[2])}
    imported = {path.parent.name for path in (ROOT / RESULTS / name).glob("*/rows.jsonl")}
    assert named <= (imported if study.kind == "rows" else {*study.arms})
    assert all(claim.number is not None and claim.rule.sentence for claim in study.claims)


def test_every_headline_result_has_a_study():
    claims = [claim for name in find_studies(FOLDER) for claim in load_study(name, FOLDER).claims]
    assert {claim.number for claim in claims} == {*RESULTS_TESTED}


def test_rules_name_cells_that_the_ladder_has():
    study = load_study("ladder", FOLDER)
    # By the tokens of whole steps, as in the rows: 118M are 7,203 steps, and some more tokens.
    cells = {
        cell_name(place.size, place.tokens)
        for config in ladder_configs(study).values()
        for rung in config.rungs
        for place in places(config, rung)
    }
    for claim in study.claims:
        patterns = [getattr(claim.rule, "cell", "*"), *claim.rule.arms]
        for pattern in patterns:
            assert any(fnmatchcase(cell, pattern.removeprefix("rates,")) for cell in cells), (claim.name, pattern)


def test_profiles_of_the_ladder_are_taken_at_the_steps_that_its_claims_name():
    study = load_study("ladder", FOLDER)
    claim = next(claim for claim in study.claims if claim.name == "pre-growth")
    config = ladder_configs(study)["main"]
    trunk = config.run(config.rungs[2], "pre", config.rungs[2].budgets[-1], 1e-3, 0)
    trunk = dataclasses.replace(trunk, branches=config.rungs[2].budgets[:-1])
    taken = sorted({0} | Milestones.of(trunk).profiles)
    kept = summarise([{"kind": "profile", "step": step, "layers": [0]} for step in taken], trunk.steps)["profiles"]
    places_named = [int(place) for place in re.findall(r"profiles\.(-\d+)", claim.rule.value)]
    assert [f"{kept[place]['step']:,}" for place in places_named] == re.findall(r"\d,\d{3}", claim.claim)[::-1]


def test_the_cost_that_is_stated_counts_the_runs():
    for name in find_studies(FOLDER):
        words = load_study(name, FOLDER).cost
        stated = sum(int(number) for number in re.findall(r"(\d+) (?:runs|of 3M|simulations|checks)", words))
        assert stated in (planned_runs(name), 0), name


def test_what_could_be_shown_is_said_before_the_runs():
    for name in find_studies(FOLDER):
        assert all(claim.power for claim in load_study(name, FOLDER).claims), name


def test_high_rates_are_not_softened():
    for config in comparison_configs(load_study("high-rates", FOLDER)).values():
        assert (config.base.trouble, config.base.clip) == ("none", math.inf)


def test_heads_are_not_tied_and_tuned_rates_can_be_bracketed():
    """Two rates have no middle: a best rate would always be an end of the list."""
    for name in find_studies(FOLDER):
        study = load_study(name, FOLDER)
        for arm, config in comparison_configs(study).items():
            if config.base.task == "language":
                assert not config.base.model.tied_head, (name, arm)
            rules = [claim.rule for claim in study.claims if not claim.rule.arms or arm in claim.rule.arms]
            compares = any(
                isinstance(rule, DifferenceRule | OrderRule | ChangeRule) and rule.value == VALUE for rule in rules
            )
            assert not compares or len(config.lrs) > 2, (name, arm)
