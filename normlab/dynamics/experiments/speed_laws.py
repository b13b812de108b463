"""Speed laws: how fast tokens begin to meet and how they meet in the end, for every scheme.

At the start tokens are orthonormal, and all pairs have one cosine ρ at all times: the full system is held against the
two scalar equations of the symmetric case. In the end tokens are close together: the tail of Var is fitted in the form
that the law names and held against the rate that it gives.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, Tell, judge, part
from normlab.dynamics.measure import fits, tails
from normlab.dynamics.recording import Recording, orbit, records
from normlab.dynamics.system import batching, laws
from normlab.dynamics.system.equiangular import Equiangular
from normlab.dynamics.system.systems import SystemChunk, look_times
from normlab.dynamics.system.threads import suited
from normlab.dynamics.view.figures import Curve, Figure, curve
from normlab.schemes.contract.law import Law
from normlab.utils.text import counted

_TAIL_DIM = 8
_DEPTH = 24
"""Blocks of the networks whose laws depend on depth."""
_SETTLED = 1e-5
"""How close to its limit a law's rate must be where the tail ends."""
_FARTHEST = 1e9
_FOLDS = 45.0
"""How far ln Var falls: down to what double precision holds."""
_STEP = 0.1
"""In units of the tail's own scale: the rate is then right to (2 · 0.1)⁴/120."""
Judged = tuple[list[PredictionVerdict], list[Curve]]
"""What a scheme's numbers come to, and its curves."""
_LIMITS = {"start": 1e-4, "tail": 1e-3, "symmetric": 1e-6}


def run(config: SimulateConfig, tell: Tell) -> Findings:
    """All schemes of the configuration, at its first β."""
    config = config.replace(beta=config.beta[:1], seeds=1, depth=config.depth or _DEPTH)
    found = [laws.find(spec, config.layers) for spec in config.scheme]
    theories = [tails.predict(law) for law in found]
    starts = _starts(config, found, part(tell, 0, 2))
    ends = _ends(config, found, theories, part(tell, 1, 2))
    return Findings(
        figures=(
            Figure(
                title="From orthonormal tokens",
                x_label="time",
                y_label="cosine of two tokens",
                curves=tuple(line for _, curves in starts for line in curves),
            ),
            Figure(
                title="The tail",
                x_label="time",
                y_label="variance",
                x_log=True,
                y_log=True,
                curves=tuple(line for _, curves in ends for line in curves),
            ),
        ),
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
            "the tail of a law that reads radii (no norm before attention) is fitted and not foretold",
        ),
    )


def _row(spec: str, theory: tails.Tail | None, start: list[PredictionVerdict], tail: list[PredictionVerdict]) -> tuple:
    first, apart = start[0], start[1].measured
    found = tail[0] if tail else None
    interval = None if found is None or found.low is None else f"{found.low:.4f} to {found.high:.4f}"
    measured = None if found is None else f"{found.quantity.removeprefix('tail ')}, a = {found.measured:.5f}"
    return (spec, first.measured, first.predicted, apart, measured, None if theory is None else str(theory), interval)


def _starts(config: SimulateConfig, found: list[Law], tell: Tell) -> list[Judged]:
    """Of every scheme the initial velocity, and the whole orbit against the symmetric equations."""
    config = config.replace(start="orthonormal", dim=max(config.dim, config.tokens))
    followed = records(config, config.scheme, observables=("cosine",), tell=tell)
    cosines = [one.values["cosine"][:, 0, 0] for one in followed]
    symmetric = _symmetric(config, found)
    return [
        _start(config, spec, law, cosine, rho)
        for spec, law, cosine, rho in zip(config.scheme, found, cosines, symmetric, strict=True)
    ]


def _start(config: SimulateConfig, spec: str, law: Law, cosine: np.ndarray, rho: np.ndarray) -> Judged:
    velocity, times = _initial_velocity(config, spec), look_times(config)
    apart = float(abs(rho - cosine).max())
    verdicts = [
        judge(spec, "initial velocity", velocity, _foretold(config, law), _LIMITS["start"], relative=True),
        judge(spec, "largest distance from the symmetric orbit", apart, 0.0, _LIMITS["symmetric"]),
    ]
    return verdicts, [curve(spec, times, cosine, marks=True), curve(f"{spec}, symmetric", times, rho, role="theory")]


def _initial_velocity(config: SimulateConfig, spec: str) -> float:
    """d/dt of the mean cosine at time zero: 2⟨Σθ̇, Σθ⟩ / n(n − 1)."""
    chunk = SystemChunk(config.beta, (config.seed,))
    state, flow = next(orbit(config, spec, chunk, [0.0]))
    with suited(state.theta):
        velocity = flow(state).theta.sum(1)
    return float(2 * (velocity * state.theta.sum(1)).sum()) / (config.tokens * (config.tokens - 1))


def _foretold(config: SimulateConfig, law: Law) -> float:
    """ρ̇(0) of the symmetric case."""
    zero, radius = (torch.tensor(value, dtype=torch.float64) for value in (0.0, config.radius))
    return float(Equiangular(law, config.tokens, config.beta[0])(zero, zero, radius)[0])


def _symmetric(config: SimulateConfig, found: list[Law]) -> list[np.ndarray]:
    """ρ of the symmetric case at each look, of every law."""
    moments, orbits = torch.tensor(look_times(config), dtype=torch.float64), {}
    for places in batching.groups(config, found):
        law = batching.joined([found[place] for place in places])
        beta = torch.full((len(places),), config.beta[0], dtype=torch.float64)
        followed = Equiangular(law, config.tokens, beta).orbit(moments, radius=config.radius, tolerance=1e-9)
        orbits |= dict(zip(places, followed[:, 0].T.numpy(), strict=True))
    return [orbits[place] for place in range(len(found))]


def _ends(config: SimulateConfig, found: list[Law], theories: list[tails.Tail | None], tell: Tell) -> list[Judged]:
    """The tail of every scheme; those that want the same clock and horizon are followed together."""
    configs = [_tail_config(config, law, theory) for law, theory in zip(found, theories, strict=True)]
    ends: dict[int, Judged] = {}
    for own in dict.fromkeys(configs):
        places = [place for place, other in enumerate(configs) if other == own]
        specs = [config.scheme[place] for place in places]
        tell(", ".join(specs), len(ends) / len(configs))
        followed = records(own, specs, observables=("variance",))
        ends |= {
            place: _end(config.scheme[place], theories[place], one) for place, one in zip(places, followed, strict=True)
        }
    return [ends[place] for place in range(len(found))]


def _end(spec: str, theory: tails.Tail | None, found: Recording) -> Judged:
    times, values = found.times.tolist(), found.values["variance"][:, 0, 0].tolist()
    late = fits.tail(times, values, floor=fits.floor_of("float64"), share=0.25)
    if late.stop == late.start:
        return [], [curve(spec, times[1:], values[1:])]
    rate = fits.best(times[late], values[late]) if theory is None else fits.fit(times[late], values[late], theory.form)
    predicted = None if theory is None else theory.rate
    quantity, interval = f"tail {fits.FORMULAS[rate.form]}", (rate.low, rate.high)
    verdict = judge(spec, quantity, rate.value, predicted, _LIMITS["tail"], relative=True, interval=interval)
    line = curve(f"{spec}, fitted", times[late], [rate.at(time) for time in times[late]], role="theory")
    return [verdict], [curve(spec, times[1:], values[1:]), line]


def _tail_config(config: SimulateConfig, law: Law, theory: tails.Tail | None) -> SimulateConfig:
    """A clock and a horizon that show the tail: in the clock of its form every tail is an exponential."""
    config = config.replace(start="clustered", dim=_TAIL_DIM, looks=100, step=_STEP, clock="plain")
    if theory is None:
        return config.replace(time=20.0)
    if theory.form == "exponential":
        # Far from the start everything happens on the scale of the rate itself.
        slow = 2 / abs(theory.rate)
        return config.replace(time=_FOLDS / abs(theory.rate), step=_STEP * slow)
    if theory.form == "stretched":
        return config.replace(time=(_FOLDS / abs(theory.rate)) ** 2, step=2 * _STEP)
    horizon = min(_FARTHEST, 10 * tails.settles(law, theory, _SETTLED), math.exp(_FOLDS / abs(theory.rate)))
    return config.replace(time=horizon, clock="log")
