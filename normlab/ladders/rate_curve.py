"""Losses as a smooth function of the learning rate, so that one lucky run does not choose a rate.

    loss ≈ a + b·x + c·x²,  x = ln rate,  c > 0

by least squares over the rates within a factor of 2 of the best one. A loss of one seed may lie 0.1 nats below those of
the next rates on either side (docs/log.md), as no loss does that is a smooth function of the rate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_NEAR = 1.05 * 2.0
"""Factor from the best rate within which rates are fitted: two steps of √2, with room for rounded rates."""

_LEAST = 4
"""Rates that a parabola is fitted to, at least: through three it goes exactly."""


def smooth_losses(losses: Mapping[float, float]) -> dict[float, float]:
    """The losses by rate, those near the best one replaced by a parabola's; all as they are where it has no minimum."""
    best = min(losses, key=losses.__getitem__, default=None)
    near = [] if best is None else [lr for lr in losses if best / _NEAR <= lr <= best * _NEAR]
    if len(near) < _LEAST:
        return dict(losses)
    x = np.log(near)
    # Around their middle: numbers of one size.
    fitted = np.polynomial.Polynomial.fit(x - x.mean(), [losses[lr] for lr in near], 2)
    if not fitted.convert().coef[-1] > 0.0:
        return dict(losses)
    return {**losses, **dict(zip(near, fitted(x - x.mean()).tolist(), strict=True))}
