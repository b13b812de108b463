"""The questions to a new architecture, answered from ladders whose law is known."""

from __future__ import annotations

import json
import math

import pytest

from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.procedure import ProcedureStep, procedure
from normlab.checks.ladder_records import Look, StepRung
from normlab.checks.theory.records import ScaleRow, Theory
from normlab.utils.records import from_plain, to_plain
from tests.checks.synthetic import ladder


def answers(found, **options) -> dict[str, ProcedureStep]:
    options.setdefault("theory", None)
    steps = procedure(ladder=found, verdicts=judge_ladder(found), **options)
    return {step.name: step for step in steps}


def rung(step: float, loss: float | None, rms: float = 2.0) -> StepRung:
    return StepRung(step=step, depth=24, before=Look(rms=1.0, G=1.0, loss=4.3), after=Look(rms=rms, G=2.0, loss=loss))


def test_a_healthy_design():
    steps = answers(ladder(lambda k: math.sqrt(1 + k), gain=lambda depth: depth**0.5))
    assert list(steps) == [
        "forward moments over depth",
        "backward gains over depth",
        "scale test",
        "both after training",
        "residual step",
    ]
    assert {step.level for step in steps.values()} == {"ok"}
    forward, backward = steps["forward moments over depth"], steps["backward gains over depth"]
    # log √(49/25) / log 2 over the last doubling.
    assert forward.number == pytest.approx(math.log(49 / 25) / 2 / math.log(2))
    assert forward.symbol == "p"
    assert forward.answer == f"random walk, RMS ∝ L^{forward.number:.2f} from 24 to 48 blocks"
    assert forward.done.startswith("6, 12, 24, 48 blocks; ")
    assert backward.number == pytest.approx(48**0.5)
    assert backward.answer == "power law, G = 6.93 at 48 blocks, G ∝ L^0.50"
    assert steps["both after training"].number == pytest.approx(1.0)


def test_explosions_and_lost_gradients_fail():
    steps = answers(ladder(lambda k: math.exp(0.3 * k), gain=lambda depth: math.exp(-depth / 4)))
    assert steps["forward moments over depth"].level == "fail"
    assert steps["forward moments over depth"].answer.startswith("exploding")
    assert steps["backward gains over depth"].level == "fail"
    assert steps["backward gains over depth"].answer.startswith("vanishing")
    assert steps["both after training"].level == "fail"


def test_super_linear_growth_warns():
    assert answers(ladder(lambda k: (1 + k) ** 1.4, seeds=3))["forward moments over depth"].level == "warn"


def test_a_gradient_that_moves_in_training_fails():
    before = ladder(gain=lambda depth: 1.0, steps=(0,)).profiles
    after = ladder(gain=lambda depth: 1e-3, steps=(30,)).profiles
    found = type(ladder())((*before, *after))
    step = answers(found)["both after training"]
    assert step.number == pytest.approx(1000.0)
    assert step.level == "fail"
    assert step.answer.endswith("; G changed 1e+03-fold (10 is the limit); unsteady")
    assert step.done == "6, 12, 24, 48 blocks after 30 optimiser steps"


def test_without_a_burst_the_step_says_so():
    step = answers(ladder(steps=(0,)))["both after training"]
    assert step.number is None
    assert step.answer.startswith("not answered: nothing was trained")


def test_one_depth_is_not_judged():
    step = answers(ladder(depths=(12,)))["forward moments over depth"]
    assert step.number is None
    assert step.answer.startswith("growth not judged")


def test_the_target_depth_is_extrapolated_to():
    step = answers(ladder(gain=float), target=100)["backward gains over depth"]
    assert step.number == pytest.approx(100.0)


def test_theory_stands_beside_the_answer():
    row = {"block": 0, "branch": "o", "factors": (1.0, 2.0), "gains": (1.0, 2.0)}
    rows = tuple(ScaleRow(**row, slope=slope, finding="proportional") for slope in (1.0, 0.9, 0.96))
    beside = Theory(depth=4, growth="linear", backward="power law in depth", scale="all of them", scale_test=rows)
    steps = answers(ladder(), theory=beside)
    assert steps["forward moments over depth"].answer.endswith(" (theory: linear)")
    assert steps["backward gains over depth"].answer.endswith(" (theory: power law in depth)")
    assert steps["scale test"].number == pytest.approx(0.96)
    assert steps["scale test"].answer == "all of them"
    assert answers(ladder())["scale test"].answer == "not tested"


def test_the_residual_step_with_the_lowest_loss_is_named():
    rungs = [rung(1.0, 3.7, rms=22.0), rung(0.3, 3.1), rung(0.1, 3.2)]
    step = answers(ladder(), steps=rungs)["residual step"]
    assert step.number == 0.3
    assert step.answer == (
        "lowest loss with Δt = 0.3 (loss 3.1, RMS 2, G 2); "
        "Δt = 1 (loss 3.7, RMS 22, G 2); Δt = 0.1 (loss 3.2, RMS 2, G 2)"
    )
    smallest = answers(ladder(), steps=[rung(1.0, 3.7), rung(0.1, 3.0)])["residual step"]
    assert "the smallest tried: a smaller one may do better" in smallest.answer


def test_steps_that_broke_do_not_win():
    assert answers(ladder(), steps=[rung(1.0, None), rung(0.1, 3.0)])["residual step"].number == 0.1
    broken = answers(ladder(), steps=[rung(1.0, None)])["residual step"]
    assert (broken.number, broken.level) == (None, "fail")
    assert answers(ladder(), steps=None)["residual step"].answer.startswith("not answered: use --step-ladder")


def test_what_is_not_finite_is_still_a_record():
    found = answers(ladder(lambda k: math.inf if k > 20 else 1.0, gain=lambda depth: 0.0))
    assert found["forward moments over depth"].answer == "exploding: a value is not finite"
    for step in found.values():
        assert from_plain(ProcedureStep, json.loads(json.dumps(to_plain(step), allow_nan=False)), "step") == step
