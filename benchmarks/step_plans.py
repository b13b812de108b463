"""Launch plans of the backward kernels of one residual stream, timed side by side on a GPU.

    python benchmarks/step_plans.py --rows 16384 --dims 256 512 768 --out results/step-plans.json

The state is fp32 and the inputs of branches are bf16, as in training under autocast (`--stream bf16`: all bf16). A plan
is (smallest tile in elements, elements of a tile in a thread, programs on a multiprocessor, most pipeline stages), the
arguments of `launch.sweep`; `default` is what the kernel takes. Gradients must equal those of the default; parallel
processes check that, which also compiles all kernels. A plan that fails is named and not timed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from normlab.bench.facts import dated
from normlab.bench.timing import copy_bandwidth, measure
from normlab.kernels.fused import geodesic, launch, residual
from normlab.kernels.residual import KINDS
from normlab.utils.files import write_json

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU the kernels run in Triton's interpreter, which times nothing."""

Plan = tuple[int, int, int, int]
Job = tuple[str, int, int, str, Plan | None]

PLANS: tuple[Plan | None, ...] = (
    None,
    (2048, 32, 4, 1), (2048, 32, 3, 4), (2048, 32, 2, 4), (2048, 16, 2, 4), (2048, 16, 4, 2),
    (1024, 32, 8, 2), (1024, 32, 6, 3), (1024, 32, 4, 4), (1024, 16, 4, 4), (1024, 16, 6, 2), (4096, 32, 2, 2),
)  # fmt: skip
STEPS = {"pre": ("", "", "rms"), "post": ("", "rms", ""), "peri": ("rms", "", "rms"), "geodesic": None}
"""Norms of the update, of the sum, and of the next branch's input."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What is timed."""

    steps: tuple[str, ...] = tuple(STEPS)
    dims: tuple[int, ...] = (256, 512, 768)
    rows: int = 16_384
    stream: Literal["fp32", "bf16"] = "fp32"
    out: Path | None = None


def backward(step: str, rows: int, dim: int, stream: str) -> tuple[Callable[[], tuple[torch.Tensor, ...]], int]:
    """The backward pass of a step, and the bytes that it must move."""
    torch.manual_seed(0)
    dtype, half = (torch.float32 if stream == "fp32" else torch.bfloat16), torch.bfloat16
    x, d_state, g, d_input = (torch.randn(rows, dim, device=DEVICE) for _ in range(4))
    x, d_state, g, d_input = x.to(dtype), d_state.to(dtype), g.to(half), d_input.to(half)
    places = STEPS[step]
    if places is None:
        one = torch.ones(1, device=DEVICE)
        call = partial(geodesic.backward, x, g, 0.5 * one, one, 0.0 * one, 0.785, True, False, 1.0, d_state, d_input)
        moved = (x, g, d_state, d_input, x, g)
    else:
        gain = torch.rand(dim, device=DEVICE) + 0.5
        affines = [t for place in places for t in (gain if place else None, None)]
        kinds = [KINDS.get(place, 0) for place in places]
        writes, shapes = bool(places[1]), bool(places[0])
        # What autograd keeps: with a write norm x and g, else the state that was read and, if it is normalised, g.
        kept = (x if writes else None, g if shapes or writes else None, None if writes else x)
        options = ([None] * 3, affines, kinds, [1e-6] * 3, [False] * 3)
        separate = dtype != half or shapes
        call = partial(residual.backward, *kept, *options, d_state, d_input, dtype, half, separate)
        moved = (*(t for t in kept if t is not None), d_state, d_input, x, *([g] if separate else []))
    return call, sum(t.numel() * t.element_size() for t in moved)


def choose(plan: Plan | None) -> None:
    """Make both kernels take a plan."""
    residual._walk = _OWN[0] if plan is None else lambda dim, rows, reads, *_: _sweep(plan, dim, rows, reads)
    geodesic._walk = _OWN[1] if plan is None else lambda dim, rows, reads: _sweep(plan, dim, rows, reads)


_OWN = (residual._walk, geodesic._walk)


def _sweep(plan: Plan, dim: int, rows: int, reads: Any) -> launch.Sweep:
    elements, per_thread, together, stages = plan
    return launch.sweep(
        dim, rows, reads, elements=elements, per_thread=per_thread, together=together, most_stages=stages
    )


def fault(job: Job) -> str:
    """Why a plan cannot be timed, or nothing."""
    step, rows, dim, stream, plan = job
    try:
        call, _ = backward(step, rows, dim, stream)
        choose(None)
        expected = call()
        choose(plan)
        for ours, theirs in zip(call(), expected, strict=True):
            # Sums are made in another order, which may change a result by one rounding of its dtype.
            size = theirs.abs().amax() if theirs.numel() else 0.0
            if not ((ours - theirs).abs() <= torch.finfo(theirs.dtype).eps * theirs.abs() + 1e-3 * size).all():
                return "differs from the default"
    except Exception as error:  # Triton has many ways to say that registers or shared memory are not enough
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return ""


bandwidth = cache(partial(copy_bandwidth, DEVICE))


def main(arguments: Arguments) -> None:
    jobs: list[Job] = [
        (step, arguments.rows, dim, arguments.stream, plan)
        for step in arguments.steps
        for dim in arguments.dims
        for plan in PLANS
    ]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        faults = list(pool.map(fault, jobs))
    rows: list[dict[str, Any]] = []
    for job, why in zip(jobs, faults, strict=True):
        step, count, dim, stream, plan = job
        rows.append({"step": step, "rows": count, "dim": dim, "stream": stream, "plan": plan, "fault": why})
        name = f"{step:8s} {count}x{dim} {stream} {'default' if plan is None else str(plan):18s}"
        if why:
            print(f"{name} left out: {why}", flush=True)
            continue
        choose(plan)
        call, moved = backward(step, count, dim, stream)
        seconds = measure(call, DEVICE, repeats=25).median
        share = moved / seconds / bandwidth(moved)
        rows[-1] |= {"seconds": seconds, "share": share}
        print(f"{name} {1e6 * seconds:7.1f} µs, {share:.3f} of copy", flush=True)
    if arguments.out is not None:
        write_json(arguments.out, {**dated(), "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
