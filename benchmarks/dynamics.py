"""The simulator against a plain torch Euler loop, scipy and torchdiffeq: time to the same accuracy, in one run.

    OMP_NUM_THREADS=1 python benchmarks/dynamics.py                 # every case, one thread, scipy's too
    python benchmarks/dynamics.py --cases n128-d128 --threads 2 --out results/dynamics.json
    python benchmarks/dynamics.py --device cuda                     # and that a GPU finds what the CPU does

Peri-LN from uniform tokens with Q = K = V = 1. Every solver gets the largest step, or the loosest tolerance, that
brings it within `target` (RMS error of a token's direction at the horizon) of a float64 orbit at 1e-11. The loop's
error is of first order in its step: where it would take more than `patience` steps, its time is what those would take.
Seconds are the processor's, the least of the repeats, so that a busy machine disturbs them little; on a GPU they are
the clock's, and a handful of simulations and experiments is held against the same on the CPU. scipy computes in float64
and on the CPU, as it always does; all others in float32.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from scipy.integrate import solve_ivp
from torch import Tensor
from torchdiffeq import odeint

import normlab
from normlab.bench.facts import dated
from normlab.dynamics import experiments
from normlab.dynamics.experiments.result import ExperimentResult
from normlab.dynamics.result import Simulation
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.flow import Flow, ParticleState, unit
from normlab.dynamics.system.integrators import DormandPrince, Integrator, RungeKutta4
from normlab.utils.files import write_json


@dataclass(frozen=True)
class Case:
    """Systems of tokens, and how far they go."""

    systems: int
    tokens: int
    dim: int
    beta: float
    horizon: float


CASES = {
    "256-systems-n32-d2": Case(256, 32, 2, 4.0, 5.0),
    "n128-d128": Case(1, 128, 128, 2.0, 10.0),
    "n256-d512": Case(1, 256, 512, 5.0, 10.0),
    "n2048-d64": Case(1, 2048, 64, 1.0, 4.0),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to measure."""

    cases: tuple[str, ...] = tuple(CASES)
    target: float = 1e-4
    patience: int = 500
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    many: bool = True
    """Also time and weigh one evaluation and one step of 16384 tokens in 64 dimensions."""
    out: Path | None = None


# -- what others would write ---------------------------------------------------------------------------------------


def velocity(theta: Tensor, radius: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Peri-LN, vectorised: θ̇ = P A/(r‖A‖), ṙ = ⟨θ, A⟩/‖A‖."""
    pull = torch.softmax(beta * theta @ theta.mT, -1) @ theta
    pull = pull / pull.norm(dim=-1, keepdim=True)
    radial = (theta * pull).sum(-1, keepdim=True)
    return (pull - radial * theta) / radius, radial


def euler(theta: Tensor, case: Case, step: float) -> Tensor:
    radius = torch.ones_like(theta[..., :1])
    for _ in range(round(case.horizon / step)):
        turn, growth = velocity(theta, radius, case.beta)
        theta, radius = theta + step * turn, radius + step * growth
        theta = theta / theta.norm(dim=-1, keepdim=True)
    return theta


def by_torchdiffeq(theta: Tensor, case: Case, tolerance: float) -> Tensor:
    def slope(_time: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return velocity(*state, case.beta)

    times = torch.tensor([0.0, case.horizon], dtype=theta.dtype, device=theta.device)
    start = (theta, torch.ones_like(theta[..., :1]))
    return odeint(slope, start, times, rtol=tolerance, atol=tolerance, method="dopri5")[0][-1]


def by_scipy(theta: Tensor, case: Case, tolerance: float) -> Tensor:
    x = theta.double().cpu().numpy()

    def slope(_time: float, y: np.ndarray) -> np.ndarray:
        theta, radius = y[: x.size].reshape(x.shape), y[x.size :].reshape(*x.shape[:-1], 1)
        scores = case.beta * theta @ theta.swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        pull = weights @ theta
        pull /= np.linalg.norm(pull, axis=-1, keepdims=True)
        radial = (theta * pull).sum(-1, keepdims=True)
        return np.concatenate([((pull - radial * theta) / radius).ravel(), radial.ravel()])

    begin = np.concatenate([x.ravel(), np.ones(x.size // case.dim)])
    end = solve_ivp(slope, (0.0, case.horizon), begin, rtol=tolerance, atol=tolerance).y[: x.size, -1]
    return torch.from_numpy(end.reshape(x.shape)).to(theta.device)


# -- ours -----------------------------------------------------------------------------------------------------------


def ours(theta: Tensor, case: Case, method: Integrator) -> Tensor:
    start = ParticleState(theta, theta.new_ones(theta.shape[:2]), theta.new_zeros(len(theta)))
    flow = Flow(normlab.scheme("peri").law(12), ParticleAttention(beta=theta.new_full((1,), case.beta)))
    return next(method.orbit(flow, start, [case.horizon])).theta


SOLVERS: dict[str, tuple[Callable[[Tensor, Case, float], Tensor], Sequence[float]]] = {
    "normlab rk4": (lambda x, case, h: ours(x, case, RungeKutta4(step=h)), (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)),
    "normlab dopri": (
        lambda x, case, tol: ours(x, case, DormandPrince(tolerance=tol)), (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    ),
    "torch euler loop": (euler, tuple(0.125 / 2**k for k in range(12))),
    "scipy rk45": (by_scipy, (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)),
    "torchdiffeq dopri5": (by_torchdiffeq, (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)),
}  # fmt: skip


def measure(name: str, case: Case, theta: Tensor, exact: Tensor, arguments: Arguments) -> dict[str, Any]:
    """The coarsest setting within the target, and what it takes."""
    solve, settings = SOLVERS[name]
    row: dict[str, Any] = {}
    for setting in settings:
        error = float((solve(theta, case, setting).double() - exact).square().sum(-1).mean().sqrt())
        row = {"solver": name, "setting": setting, "error": error, "extrapolated": False}
        if error <= arguments.target:
            break
        if name == "torch euler loop" and case.horizon / setting >= arguments.patience:
            break
    spent = [_seconds(lambda: solve(theta, case, row["setting"]), arguments.device) for _ in range(arguments.repeats)]
    seconds = min(spent)
    if row["error"] > arguments.target and name == "torch euler loop":
        seconds, row["extrapolated"] = seconds * row["error"] / arguments.target, True
    return row | {"seconds": seconds, "reached": row["error"] <= arguments.target or row["extrapolated"]}


def _seconds(work: Callable[[], Any], device: str) -> float:
    """Of the processor, or by the clock where another device works."""
    if device == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.accelerator.synchronize()
    began = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def compare(name: str, arguments: Arguments) -> list[dict[str, Any]]:
    case = CASES[name]
    draw = torch.Generator().manual_seed(0)
    fine = torch.randn(case.systems, case.tokens, case.dim, generator=draw, dtype=torch.float64)
    fine = unit(fine).to(arguments.device)
    exact = ours(fine, case, DormandPrince(tolerance=1e-11))
    rows = [measure(solver, case, fine.float(), exact, arguments) for solver in SOLVERS]
    best = min(row["seconds"] for row in rows if row["solver"].startswith("normlab") and row["reached"])
    return [{"case": name, **row, "over_normlab": row["seconds"] / best} for row in rows]


def many_tokens(device: str) -> dict[str, Any]:
    """16384 tokens in 64 dimensions: an evaluation, a step of RK4, and memory beyond the state."""
    theta = unit(torch.randn(1, 16384, 64)).to(device)
    start = ParticleState(theta, theta.new_ones(1, 16384), theta.new_zeros(1))
    flow = Flow(normlab.scheme("peri").law(12), ParticleAttention(beta=theta.new_ones(1)))
    before, began = _peak(device), time.perf_counter()
    evaluation = _seconds(lambda: flow(start), device)
    middle = time.perf_counter()
    step = _seconds(lambda: next(RungeKutta4(step=0.1).orbit(flow, start, [0.1])), device)
    return {
        "evaluation_seconds": evaluation,
        "evaluation_wall_seconds": middle - began,
        "step_seconds": step,
        "step_wall_seconds": time.perf_counter() - middle,
        "megabytes_beyond_state": max(0.0, _peak(device) - before),
    }


def _peak(device: str) -> float:
    """Most megabytes held so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return torch.cuda.max_memory_allocated() / 2**20


# -- the same results on every device ------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "post, pre, peri, mix": {"scheme": ("post", "pre", "peri", "mix"), "beta": (1.0, 4.0), "seeds": 4},
    "every law, short": {"scheme": tuple(laws.law_names()), "time": 2.0, "looks": 10},
    "causal, random weights": {
        "scheme": ("peri", "keel"), "dim": 16, "heads": 2, "weights": "gaussian", "redraw": True, "causal": True,
        "radius": 3.0,
    },
    "network": {"scheme": ("pre", "geonorm"), "method": "network"},
    "dopri in logarithmic time": {"scheme": ("pre", "lns"), "method": "dopri", "clock": "log", "time": 1e4},
}  # fmt: skip
"""Free runs."""
TRIALS: dict[str, dict[str, Any]] = {
    "speed-laws": {"scheme": ("post", "pre", "peri", "sqrt")},
    "random-weights": {"tokens": 64, "dim": 64, "seeds": 4, "dtype": "float64"},
    "phase-diagram": {"beta": (0.5, 2.0, 6.0), "seeds": 8, "dtype": "float64"},
    "value-spectrum": {"tokens": 48, "dim": 16},
    "real-model": {"scheme": ("peri",), "tokens": 32, "seeds": 2},
}
"""Experiments."""


def differences(device: str) -> list[dict[str, Any]]:
    """How far a device's numbers are from the CPU's, relative to those that are larger than one; in float64."""
    made: dict[str, Callable[[str], list[float]]] = {
        f"simulate: {name}": lambda where, options=options: _seen(
            normlab.simulate(**{"tokens": 32, "dtype": "float64", **options}, device=where)
        )
        for name, options in RUNS.items()
    }
    made |= {
        f"experiment: {name}": lambda where, name=name: _judged(experiments.run(name, **TRIALS[name], device=where))
        for name in TRIALS
    }
    return [{"what": what, "largest_difference": _apart(make("cpu"), make(device))} for what, make in made.items()]


def _seen(found: Simulation) -> list[float]:
    return [value for run in found.runs for band in run.bands.values() for value in band.mean]


def _judged(found: ExperimentResult) -> list[float]:
    return [verdict.measured for verdict in found.verdicts]


def _apart(here: Sequence[float], there: Sequence[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(here, there, strict=True))


@torch.no_grad()
def main(arguments: Arguments) -> None:
    torch.set_num_threads(arguments.threads)
    # First, while the process is small: memory is what the process grows by.
    many = many_tokens(arguments.device) if arguments.many else None
    if many is not None:
        print("16384 tokens, 64 dimensions:", ", ".join(f"{name} {value:.2f}" for name, value in many.items()))
    rows = []
    print(f"{'case':20s} {'solver':20s} {'setting':9s} {'RMS error':>9s} {'time':>13s} {'over normlab':>12s}")
    for name in arguments.cases:
        found = compare(name, arguments)
        rows += found
        for row in found:
            _show(row, arguments)
    apart = [] if arguments.device == "cpu" else differences(arguments.device)
    for row in apart:
        print(f"{row['what']:40s} largest difference from the CPU {row['largest_difference']:.1e}")
    if arguments.out is not None:
        figures = {"target": arguments.target, "many_tokens": many, "rows": rows, "differences": apart}
        write_json(arguments.out, {**dated("numpy", "scipy", "torchdiffeq"), "threads": arguments.threads, **figures})


def _show(row: dict[str, Any], arguments: Arguments) -> None:
    note = " (extrapolated)" if row["extrapolated"] else "" if row["reached"] else f" (not within {arguments.target:g})"
    seconds = f"{1e3 * row['seconds']:10.1f} ms" if math.isfinite(row["seconds"]) else "–"
    print(
        f"{row['case']:20s} {row['solver']:20s} {row['setting']:<9.3g} {row['error']:9.1e} {seconds:>13s} "
        f"{row['over_normlab']:10.2f} x{note}"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
