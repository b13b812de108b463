"""Profiles made of formulas: the law is known, so what is found can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from normlab.checks.ladder_records import Ladder
from normlab.probes.profile import Profile

DEPTHS = (6, 12, 24, 48)


def profile(
    depth: int, rms: Callable[[int], float] = lambda k: 1.0, *, seed: int = 0, step: int = 0, **more: Any
) -> Profile:
    """A stack whose state has the size rms(k) at boundary k, and whatever else is given."""
    return Profile(boundaries=depth + 1, rms=[rms(k) for k in range(depth + 1)], seed=seed, step=step, **more)


def ladder(
    rms: Callable[[int], float] = lambda k: 1.0,
    *,
    depths: Iterable[int] = DEPTHS,
    steps: Iterable[int] = (0, 30),
    gain: Callable[[int], float] = lambda depth: 1.0,
    noise: float = 0.0,
    seeds: int = 1,
) -> Ladder:
    """The same law at every depth; log G(depth) is spread evenly over the blocks, sizes get log-normal noise."""
    random = np.random.default_rng(seeds * 1000 + int(noise * 1e6))
    profiles = []
    for depth in depths:
        for step in steps:
            for seed in range(seeds):
                factor = float(np.exp(noise * random.standard_normal()))
                profiles.append(
                    profile(
                        depth, lambda k, f=factor: rms(k) * f, seed=seed, step=step, grad_h=slope(depth, gain(depth))
                    )
                )
    return Ladder(tuple(profiles))


def slope(depth: int, gain: float) -> list[float]:
    """Gradient norms with g_1 / g_L = gain, equal from block to block."""
    return [gain ** ((depth - place) / (depth - 1)) for place in range(depth + 1)]
