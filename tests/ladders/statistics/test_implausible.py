"""implausible_losses(): rises and quickening falls are named, what a law or usual noise gives is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import answer
from normlab.ladders.statistics.implausible import implausible_losses
from normlab.ladders.statistics.simulated.ladders import (
    USUAL,
    SimulatedLadder,
    as_rows,
    simulate,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import TRUTHS
from tests.ladders.statistics.known_rows import noisy_rows

FEW_STEPS = 3000


def _one_size(losses: Sequence[float | None], steps: int | None = None) -> list[LadderRow]:
    """One scheme at one size; tokens double from loss to loss."""
    return [
        LadderRow("pre", "110M", 110_000_000, 10**9 * 2**index, 1e18 * 2**index, 0, loss, steps=steps)
        for index, loss in enumerate(losses)
    ]


def test_losses_that_fall_by_less_and_less_are_plausible() -> None:
    assert implausible_losses(_one_size([3.53, 3.16, 3.04, 2.94, 2.87, 2.80]), FEW_STEPS) == []


def test_a_run_of_another_series_is_found_on_both_of_its_sides() -> None:
    """C4 at 411M parameters as published (arXiv 2403.08540): the run with 80 tokens a parameter is 0.08 too low."""
    (line,) = implausible_losses(_one_size([3.163, 3.042, 2.943, 2.787, 2.803]), FEW_STEPS)
    assert "the loss rises from 2.787 at 110M with 8B tokens to 2.803 at 110M with 16B tokens" in line
    assert "falls by 0.099 up to 110M with 4B tokens, and by 0.156 from there to 8B" in line
    assert line.startswith("Losses of pre contradict each other")


def test_uneven_budgets_are_compared_for_each_doubling() -> None:
    """On a straight line over ln tokens no budget quickens the fall, wherever it lies."""
    rows = [
        replace(row, tokens=tokens, flops=float(tokens), loss=4.0 - 0.1 * float(np.log2(tokens)))
        for row, tokens in zip(_one_size([0.0] * 4), (10**6, 11 * 10**5, 7 * 10**7, 8 * 10**7), strict=True)
    ]
    assert implausible_losses(rows, FEW_STEPS) == []


def test_shapes_of_one_size_need_not_be_alike() -> None:
    """A wide and a deep model of nearly as many parameters; one of twice as many is another matter."""
    wide, deep = (
        LadderRow("pre", size, parameters, 10**9, 6e9 * parameters, 0, loss)
        for size, parameters, loss in (("8x724", 50_000_000, 3.25), ("32x362", 51_000_000, 3.30))
    )
    assert implausible_losses([wide, deep], FEW_STEPS) == []
    assert len(implausible_losses([wide, replace(deep, parameters=100_000_000, flops=6e17)], FEW_STEPS)) == 1


def test_early_training_may_quicken() -> None:
    quickening = [6.0, 5.5, 4.5]
    assert implausible_losses(_one_size(quickening, steps=FEW_STEPS - 1), FEW_STEPS) == []
    assert len(implausible_losses(_one_size(quickening, steps=FEW_STEPS), FEW_STEPS)) == 1
    assert len(implausible_losses(_one_size(quickening), FEW_STEPS)) == 1
    assert len(implausible_losses(_one_size([4.5, 4.6], steps=10), FEW_STEPS)) == 1


def test_a_larger_model_with_a_larger_loss_is_named() -> None:
    large = [replace(row, size="350M", parameters=350_000_000, flops=3 * row.flops) for row in _one_size([3.2, 2.9])]
    (line,) = implausible_losses([*_one_size([3.1, 3.0]), *large], FEW_STEPS)
    assert "the loss rises from 3.100 at 110M with 1B tokens to 3.200 at 350M with 1B tokens" in line
    assert line.count("rises") == 1


def test_many_contradictions_are_counted() -> None:
    (line,) = implausible_losses(_one_size([3.0, 3.1, 3.2, 3.3, 3.4, 3.5]), FEW_STEPS)
    assert line.count("rises") == 3
    assert "; and 2 more. A run there" in line


@pytest.mark.parametrize("rows", [[], _one_size([3.0]), _one_size([3.0, None]), _one_size([None, None, None])])
def test_few_or_no_losses_contradict_nothing(rows: list[LadderRow]) -> None:
    assert implausible_losses(rows, FEW_STEPS) == []


@pytest.mark.parametrize("ladder", [simulated_path(), simulated_grid()], ids=lambda own: own.name)
@pytest.mark.parametrize("seeds", [1, 3])
def test_usual_noise_gives_no_false_alarm(ladder: SimulatedLadder, seeds: int) -> None:
    """At most one ladder in a hundred: rungs shift all schemes by 0.010 nats, runs vary by 0.006."""
    alarms, repeats = 0, 100
    for truth in TRUTHS[:2]:
        gaps, losses = simulate(ladder, truth, USUAL, seeds, repeats, np.random.default_rng(3))
        alarms += sum(
            bool(implausible_losses(as_rows(ladder, own, base), FEW_STEPS))
            for own, base in zip(gaps, losses, strict=True)
        )
    assert alarms <= 2 * repeats // 100


def test_the_answer_cautions() -> None:
    rows = noisy_rows(simulated_grid(), TRUTHS[0].name)
    assert not any("contradict each other" in line for line in answer(rows, baseline="pre").cautions)
    top = max(row.tokens for row in rows)
    off = [replace(row, loss=(row.loss or 0.0) + 0.3 * (row.size == "8x512" and row.tokens == top)) for row in rows]
    found = [line for line in answer(off, baseline="pre").cautions if "contradict each other" in line]
    assert [line.split()[2] for line in found] == ["pre", "peri"]
    assert all("the loss rises" in line and "8x512 with 118M tokens" in line for line in found)
