"""Phase diagrams: recorded times, figure, and the time at which half of the token pairs have merged."""

from __future__ import annotations

import math

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.measure.observables import CLOSE_COSINE
from normlab.dynamics.recording import Recording
from normlab.dynamics.system.equiangular import Equiangular
from normlab.dynamics.view.figures import Curve, Figure, make_curve, make_image
from normlab.schemes.contract.law import Law


def phase_times(config: SimulateConfig) -> list[float]:
    """Recorded times, denser at the start, where schemes that divide by ‖A‖ move fast."""
    steps = np.linspace(0.0, 1.0, config.looks + 1)
    return [float(time) for time in config.time * (0.1 * steps + 0.9 * steps**2)]


def phase_figure(spec: str, config: SimulateConfig, found: Recording, curves: tuple[Curve, ...]) -> Figure:
    """Heat map of the share of merged pairs over time and β, with curves on top."""
    shares = found.values["close"].mean(-1)
    return Figure(
        title=f"{spec}: share of pairs with cosine above {CLOSE_COSINE}",
        x_label="time",
        y_label="β",
        image=make_image(found.times, config.beta, shares.T, "share of pairs"),
        curves=curves,
    )


def half_times(found: Recording) -> np.ndarray:
    """For each β the time at which half of the pairs have merged; NaN if they never do."""
    shares = found.values["close"].mean(-1)
    return np.array([crossing_time(found.times, shares[:, place], 0.5) for place in range(shares.shape[1])])


def symmetric_times(law: Law, config: SimulateConfig, times: np.ndarray) -> np.ndarray:
    """For each β the predicted merge time of orthonormal tokens, from the equations of the symmetric case."""
    beta = torch.tensor(config.beta, dtype=torch.float64)
    orbits = Equiangular(law, config.tokens, beta).orbit(torch.as_tensor(times), radius=config.radius, tolerance=1e-8)
    return np.array([crossing_time(times, rho, CLOSE_COSINE) for rho in orbits[:, 0].T.numpy()])


def crossing_time(times: np.ndarray, values: np.ndarray, level: float) -> float:
    """Time at which an increasing series first reaches a level, linearly interpolated; NaN if never."""
    above = np.nonzero(values >= level)[0]
    if not len(above):
        return math.nan
    last = above[0]
    if last == 0:
        return float(times[0])
    share = (level - values[last - 1]) / (values[last] - values[last - 1])
    return float(times[last - 1] + share * (times[last] - times[last - 1]))


def phase_curve(name: str, config: SimulateConfig, times: np.ndarray) -> Curve:
    """Merge times over β as a curve on the heat map; NaNs are left out."""
    shown = np.isfinite(times)
    return make_curve(name, times[shown], np.asarray(config.beta)[shown], role="theory")
