"""Rows of simulated ladders, with known gaps."""

from __future__ import annotations

import numpy as np

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics import LadderAnswer, Place
from normlab.ladders.statistics.answer import SchemeAnswer
from normlab.ladders.statistics.simulated.ladders import (
    USUAL,
    Noise,
    SimulatedLadder,
    as_rows,
    simulate,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import TRUTHS, baseline_loss

BY_NAME = {truth.name: truth for truth in TRUTHS}
TARGET = Place(
    name="16x1024 with 400M tokens", size="16x1024", parameters=236_000_000, tokens=400_000_000, flops=1.52e9 * 400e6
)

SMALL = (
    simulated_path(1), simulated_path(2), simulated_path(3), simulated_grid(1, 3), simulated_grid(3, 1),
    simulated_grid(2, 2),
)  # fmt: skip


def noisy_rows(
    ladder: SimulatedLadder, truth: str, seed: int = 0, seeds: int = 3, scheme: str = "peri", noise: Noise = USUAL
) -> list[LadderRow]:
    gaps, losses = simulate(ladder, BY_NAME[truth], noise, seeds, 1, np.random.default_rng(seed))
    return as_rows(ladder, gaps[0], losses[0], scheme)


def exact_rows(ladder: SimulatedLadder, truth: str) -> list[LadderRow]:
    gap = np.tile(BY_NAME[truth].gap(ladder.cells)[:, None], 3)
    loss = np.tile(baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None], 3)
    return as_rows(ladder, gap, loss)


def only(found: LadderAnswer) -> SchemeAnswer:
    assert len(found.schemes) == 1
    return found.schemes[0]
