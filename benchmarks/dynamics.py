"""The simulator against a plain torch Euler loop, scipy and torchdiffeq: time to the same accuracy, in one run.

    python benchmarks/dynamics.py                                   # every case, one thread
    python benchmarks/dynamics.py --cases n128-d128 --threads 2 --out results/dynamics.json

Peri-LN from uniform tokens with Q = K = V = 1. Every solver gets the largest step, or the loosest tolerance, that
brings it within `target` (RMS error of a token's direction at the horizon) of a float64 orbit at 1e-11. The loop's
error is of first order in its step: where it would take more than `patience` steps, its time is what those would take.
Seconds are the processor's, the least of the repeats, so that a busy machine disturbs them little. scipy computes in
float64, as it always does; all others in float32.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from scipy.integrate import solve_ivp
from torch import Tensor
from torchdiffeq import odeint

import normlab
from normlab.dynamics.attention import Attention
from normlab.dynamics.flow import Flow, State, unit
from normlab.dynamics.integrate import DormandPrince, Method, RungeKutta4
from normlab.files import write_json
from normlab.versions import versions


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
    patience: int = 1000
    repeats: int = 3
    threads: int = 1
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

    times = torch.tensor([0.0, case.horizon], dtype=theta.dtype)
    start = (theta, torch.ones_like(theta[..., :1]))
    return odeint(slope, start, times, rtol=tolerance, atol=tolerance, method="dopri5")[0][-1]


def by_scipy(theta: Tensor, case: Case, tolerance: float) -> Tensor:
    x = theta.double().numpy()

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
    return torch.from_numpy(end.reshape(x.shape))


# -- ours -----------------------------------------------------------------------------------------------------------


def ours(theta: Tensor, case: Case, method: Method) -> Tensor:
    start = State(theta, theta.new_ones(theta.shape[:2]), theta.new_zeros(len(theta)))
    flow = Flow(normlab.scheme("peri").law(12), Attention(beta=theta.new_full((1,), case.beta)))
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
    seconds = min(_seconds(lambda: solve(theta, case, row["setting"])) for _ in range(arguments.repeats))
    if row["error"] > arguments.target and name == "torch euler loop":
        seconds, row["extrapolated"] = seconds * row["error"] / arguments.target, True
    return row | {"seconds": seconds, "reached": row["error"] <= arguments.target or row["extrapolated"]}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(name: str, arguments: Arguments) -> list[dict[str, Any]]:
    case = CASES[name]
    draw = torch.Generator().manual_seed(0)
    fine = unit(torch.randn(case.systems, case.tokens, case.dim, generator=draw, dtype=torch.float64))
    exact = ours(fine, case, DormandPrince(tolerance=1e-11))
    rows = [measure(solver, case, fine.float(), exact, arguments) for solver in SOLVERS]
    best = min(row["seconds"] for row in rows if row["solver"].startswith("normlab") and row["reached"])
    return [{"case": name, **row, "over_normlab": row["seconds"] / best} for row in rows]


def many_tokens() -> dict[str, Any]:
    """16384 tokens in 64 dimensions: an evaluation, a step of RK4, and memory beyond the state."""
    theta = unit(torch.randn(1, 16384, 64))
    start = State(theta, torch.ones(1, 16384), torch.zeros(1))
    flow = Flow(normlab.scheme("peri").law(12), Attention(beta=torch.ones(1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    walls = []
    for work in (lambda: flow(start), lambda: next(RungeKutta4(step=0.1).orbit(flow, start, [0.1]))):
        began = time.perf_counter()
        processor = _seconds(work)
        walls.append((processor, time.perf_counter() - began))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "evaluation_seconds": walls[0][0],
        "step_seconds": walls[1][0],
        "step_wall_seconds": walls[1][1],
        "megabytes_beyond_state": max(0.0, (peak - before) / 1024),
    }


@torch.no_grad()
def main(arguments: Arguments) -> None:
    torch.set_num_threads(arguments.threads)
    # First, while the process is small: memory is what the process grows by.
    many = many_tokens() if arguments.many else None
    if many is not None:
        print("16384 tokens, 64 dimensions:", ", ".join(f"{name} {value:.2f}" for name, value in many.items()))
    rows = [row for name in arguments.cases for row in compare(name, arguments)]
    for row in rows:
        _show(row, arguments)
    if arguments.out is not None:
        settings = dataclasses.asdict(arguments) | {"out": str(arguments.out)}
        peers = {name: version(name) for name in ("numpy", "scipy", "torchdiffeq")}
        machine = {"cpu": _processor(), "cores": os.cpu_count(), "versions": versions() | peers}
        write_json(
            arguments.out,
            {"script": "benchmarks/dynamics.py", **settings, **machine, "many_tokens": many, "rows": rows},
        )


def _processor() -> str:
    """The name that Linux gives the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _show(row: dict[str, Any], arguments: Arguments) -> None:
    note = " (extrapolated)" if row["extrapolated"] else "" if row["reached"] else f" (not within {arguments.target:g})"
    seconds = f"{1e3 * row['seconds']:10.1f} ms" if math.isfinite(row["seconds"]) else "–"
    print(
        f"{row['case']:20s} {row['solver']:20s} {row['setting']:<9.3g} error {row['error']:.1e} {seconds} "
        f"{row['over_normlab']:8.2f} x{note}"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
