"""Experiment speed-laws: initial velocity and late-time decay of the variance of every scheme, against closed forms.

From orthonormal tokens all pairs keep one common cosine ρ, so the full system is compared with the two scalar
equations of the symmetric case. From clustered tokens, the tail of the variance is fitted in the functional form that
the law predicts, and its rate is compared with the predicted one.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.measure import fits, tails
from normlab.dynamics.progress import ProgressCallback, subtask
from normlab.dynamics.recording import Recording, record_laws, trajectory
from normlab.dynamics.system import laws, small_systems
from normlab.dynamics.system.equiangular import Equiangular
from normlab.dynamics.system.small_systems import limit_threads
from normlab.dynamics.system.systems import SystemChunk, sample_times
from normlab.dynamics.view.figures import Curve, Figure, make_curve
from normlab.schemes.contract.law import Law
from normlab.utils.text import counted

_TAIL_DIM = 8
_DEPTH = 24
"""Number of blocks for laws that depend on depth."""
_SETTLED = 1e-5
"""Relative distance of a law's rate from its limit at the end of the tail."""
_FARTHEST = 1e9
_FOLDS = 45.0
"""Decrease of ln Var over the tail: down to the limit of double precision."""
_STEP = 0.1
"""Step in units of the tail's time scale: the relative error of the rate is (2 · 0.1)⁴/120."""
SchemeFindings = tuple[list[PredictionVerdict], list[Curve]]
"""Verdicts and curves of one scheme."""
_LIMITS = {"start": 1e-4, "tail": 1e-3, "symmetric": 1e-6}


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Measure all schemes of the configuration."""
    config = config.replace(depth=config.depth or _DEPTH)
    found = [laws.find_law(spec, config.layers) for spec in config.scheme]
    theories = [tails.predict_tail(law) for law in found]
    starts = _starts(config, found, subtask(tell, 0, 2))
    ends = _ends(config, found, theories, subtask(tell, 1, 2))
    return Findings(
        figures=_figures(starts, ends),
        columns=("scheme", "ρ̇(0)", "theory", "largest |Δρ|", "tail of the variance", "theory", "95 % interval"),
        rows=tuple(
            _row(spec, theory, start, tail)
            for spec, theory, (start, _), (tail, _) in zip(config.scheme, theories, starts, ends, strict=True)
        ),
        verdicts=tuple(
            verdict for (start, _), (tail, _) in zip(starts, ends, strict=True) for verdict in (*start, *tail)
        ),
        notes=(
            f"{config.tokens} tokens, β = {config.beta[0]:g}, radius {config.radius:g}; tails from a clustered start "
            f"in dimension {_TAIL_DIM}; laws that depend on depth are those of {counted(config.layers, 'block')}",
            "the tail of a law that reads radii (no norm before attention) is fitted without a prediction",
        ),
    )


def _figures(starts: list[SchemeFindings], ends: list[SchemeFindings]) -> tuple[Figure, Figure]:
    start = Figure(
        title="From orthonormal tokens",
        x_label="time",
        y_label="cosine of two tokens",
        curves=tuple(line for _, curves in starts for line in curves),
    )
    tail = Figure(
        title="The tail",
        x_label="time",
        y_label="variance",
        x_log=True,
        y_log=True,
        curves=tuple(line for _, curves in ends for line in curves),
    )
    return start, tail


def _row(spec: str, theory: tails.Tail | None, start: list[PredictionVerdict], tail: list[PredictionVerdict]) -> tuple:
    first, apart = start[0], start[1].measured
    found = tail[0] if tail else None
    interval = None if found is None or found.low is None else f"{found.low:.4f} to {found.high:.4f}"
    measured = None if found is None else f"{found.quantity.removeprefix('tail ')}, a = {found.measured:.5f}"
    return (spec, first.measured, first.predicted, apart, measured, None if theory is None else str(theory), interval)


def _starts(config: SimulateConfig, found: list[Law], tell: ProgressCallback) -> list[SchemeFindings]:
    """Compare initial velocity and whole trajectory of every scheme with the symmetric equations."""
    config = config.replace(start="orthonormal", dim=max(config.dim, config.tokens))
    followed = record_laws(config, config.scheme, observables=("cosine",), tell=tell)
    cosines = [one.values["cosine"][:, 0, 0] for one in followed]
    symmetric = _symmetric(config, found)
    return [
        _start(config, spec, law, cosine, rho)
        for spec, law, cosine, rho in zip(config.scheme, found, cosines, symmetric, strict=True)
    ]


def _start(config: SimulateConfig, spec: str, law: Law, cosine: np.ndarray, rho: np.ndarray) -> SchemeFindings:
    velocity, times = _initial_velocity(config, spec), sample_times(config)
    apart = float(abs(rho - cosine).max())
    verdicts = [
        judge_prediction(
            spec, "initial velocity", velocity, _predicted_velocity(config, law), _LIMITS["start"], relative=True
        ),
        judge_prediction(spec, "largest distance from the symmetric orbit", apart, 0.0, _LIMITS["symmetric"]),
    ]
    return verdicts, [
        make_curve(spec, times, cosine, marks=True),
        make_curve(f"{spec}, symmetric", times, rho, role="theory"),
    ]


def _initial_velocity(config: SimulateConfig, spec: str) -> float:
    """d/dt of the mean cosine at time zero: 2⟨Σθ̇, Σθ⟩ / n(n − 1)."""
    chunk = SystemChunk(config.beta, (config.seed,))
    state, flow = next(trajectory(config, spec, chunk, [0.0]))
    with limit_threads(state.theta):
        velocity = flow(state).theta.sum(1)
    return float(2 * (velocity * state.theta.sum(1)).sum()) / (config.tokens * (config.tokens - 1))


def _predicted_velocity(config: SimulateConfig, law: Law) -> float:
    """ρ̇(0) from the equations of the symmetric case."""
    zero, radius = (torch.tensor(value, dtype=torch.float64) for value in (0.0, config.radius))
    return float(Equiangular(law, config.tokens, config.beta[0])(zero, zero, radius)[0])


def _symmetric(config: SimulateConfig, found: list[Law]) -> list[np.ndarray]:
    """ρ of the symmetric case at the recorded times, for every law."""
    moments, orbits = torch.tensor(sample_times(config), dtype=torch.float64), {}
    for places in small_systems.batch_groups(config, found):
        law = small_systems.join_laws([found[place] for place in places])
        beta = torch.full((len(places),), config.beta[0], dtype=torch.float64)
        followed = Equiangular(law, config.tokens, beta).orbit(moments, radius=config.radius, tolerance=1e-9)
        orbits |= dict(zip(places, followed[:, 0].T.numpy(), strict=True))
    return [orbits[place] for place in range(len(found))]


def _ends(
    config: SimulateConfig, found: list[Law], theories: list[tails.Tail | None], tell: ProgressCallback
) -> list[SchemeFindings]:
    """Fit the tail of every scheme; schemes with the same clock and end time are simulated together."""
    configs = [_tail_config(config, law, theory) for law, theory in zip(found, theories, strict=True)]
    ends: dict[int, SchemeFindings] = {}
    for own in dict.fromkeys(configs):
        places = [place for place, other in enumerate(configs) if other == own]
        specs = [config.scheme[place] for place in places]
        tell(", ".join(specs), len(ends) / len(configs))
        followed = record_laws(own, specs, observables=("variance",))
        ends |= {
            place: _end(config.scheme[place], theories[place], one) for place, one in zip(places, followed, strict=True)
        }
    return [ends[place] for place in range(len(found))]


def _end(spec: str, theory: tails.Tail | None, found: Recording) -> SchemeFindings:
    times, values = found.times.tolist(), found.values["variance"][:, 0, 0].tolist()
    late = fits.tail_slice(times, values, floor=fits.variance_floor("float64"), share=0.25)
    if late.stop == late.start:
        return [], [make_curve(spec, times[1:], values[1:])]
    rate = (
        fits.fit_best_form(times[late], values[late])
        if theory is None
        else fits.fit_rate(times[late], values[late], theory.form)
    )
    predicted = None if theory is None else theory.rate
    quantity, interval = f"tail {fits.FORMULAS[rate.form]}", (rate.low, rate.high)
    verdict = judge_prediction(spec, quantity, rate.value, predicted, _LIMITS["tail"], relative=True, interval=interval)
    line = make_curve(f"{spec}, fitted", times[late], [rate.at(time) for time in times[late]], role="theory")
    return [verdict], [make_curve(spec, times[1:], values[1:]), line]


def _tail_config(config: SimulateConfig, law: Law, theory: tails.Tail | None) -> SimulateConfig:
    """Clock and end time that show the tail: in the clock of its form every tail is an exponential."""
    config = config.replace(start="clustered", dim=_TAIL_DIM, looks=100, step=_STEP, clock="plain")
    if theory is None:
        return config.replace(time=20.0)
    if theory.form == "exponential":
        # At late times the time scale is that of the rate.
        slow = 2 / abs(theory.rate)
        return config.replace(time=_FOLDS / abs(theory.rate), step=_STEP * slow)
    if theory.form == "stretched":
        return config.replace(time=(_FOLDS / abs(theory.rate)) ** 2, step=2 * _STEP)
    horizon = min(_FARTHEST, 10 * tails.settling_time(law, theory, _SETTLED), math.exp(_FOLDS / abs(theory.rate)))
    return config.replace(time=horizon, clock="log")
