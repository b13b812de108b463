"""What the two phase diagrams share: the share of pairs that have met over time and β, and when half of them have."""

from __future__ import annotations

import math

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.measure.observables import CLOSE
from normlab.dynamics.recording import Recording
from normlab.dynamics.system.equiangular import Equiangular
from normlab.dynamics.view.figures import Curve, Figure, curve, image
from normlab.schemes.contract.law import Law


def look_times(config: SimulateConfig) -> list[float]:
    """Closer together at the start, where schemes that divide by ‖A‖ are fast: steps end at looks."""
    steps = np.linspace(0.0, 1.0, config.looks + 1)
    return [float(time) for time in config.time * (0.1 * steps + 0.9 * steps**2)]


def diagram(spec: str, config: SimulateConfig, found: Recording, curves: tuple[Curve, ...]) -> Figure:
    """The image, with curves on it."""
    shares = found.values["close"].mean(-1)
    return Figure(
        title=f"{spec}: share of pairs with cosine above {CLOSE}",
        x_label="time",
        y_label="β",
        image=image(found.times, config.beta, shares.T, "share of pairs"),
        curves=curves,
    )


def half_times(found: Recording) -> np.ndarray:
    """For each β the time at which half of the pairs have met; NaN where they have not."""
    shares = found.values["close"].mean(-1)
    return np.array([crossing(found.times, shares[:, place], 0.5) for place in range(shares.shape[1])])


def symmetric_times(law: Law, config: SimulateConfig, times: np.ndarray) -> np.ndarray:
    """For each β the time at which orthonormal tokens have met, by the symmetric equations."""
    beta = torch.tensor(config.beta, dtype=torch.float64)
    orbits = Equiangular(law, config.tokens, beta).orbit(torch.as_tensor(times), radius=config.radius, tolerance=1e-8)
    return np.array([crossing(times, rho, CLOSE) for rho in orbits[:, 0].T.numpy()])


def crossing(times: np.ndarray, values: np.ndarray, level: float) -> float:
    """When a rising curve first reaches a level, between looks by a line."""
    above = np.nonzero(values >= level)[0]
    if not len(above):
        return math.nan
    last = above[0]
    if last == 0:
        return float(times[0])
    share = (level - values[last - 1]) / (values[last] - values[last - 1])
    return float(times[last - 1] + share * (times[last] - times[last - 1]))


def line(name: str, config: SimulateConfig, times: np.ndarray) -> Curve:
    """Times over β as a curve on the image."""
    shown = np.isfinite(times)
    return curve(name, times[shown], np.asarray(config.beta)[shown], role="theory")
