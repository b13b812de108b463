"""Launch plans of the fused step of streams with dynamic coefficients, timed side by side on a GPU.

    python benchmarks/dynamic_stream_plans.py

Four streams of width 768 in bf16, 65536 tokens, logits of all streams of a token together (mhc) or of each alone (hc).
The first plan of a pass is the default (forward the second for hc). Parity with a reference in fp32 is checked first,
in parallel processes that also compile; a plan that fails is named and not timed. To make another the default, change
`plan` in `normlab/kernels/fused/dynamic_streams.py`, `FIRST_PLAN` or `WEIGHT_PLAN` in `dynamic_streams_gradient.py`, or
`PLAN` in `dynamic_streams_columns.py`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import torch

from normlab.bench.timing import copy_bandwidth, measure
from normlab.kernels.dynamic_streams import DynamicRead, dynamic_step
from normlab.kernels.fused import dynamic_streams, dynamic_streams_columns, dynamic_streams_gradient
from normlab.kernels.residual import Affine

Plan = tuple[int, ...]
ROWS, STREAMS, DIM, DTYPE, DEVICE = 65536, 4, 768, torch.bfloat16, torch.device("cuda")
TENSORS = {"forward": 10, "tokens": 5, "columns": 15, "weight": 4}
"""Tensors of one stream that each pass must move."""
PLANS: dict[str, list[Plan]] = {
    # (tokens, columns, warps, stages, programs together)
    "forward": [
        (32, 64, 8, 2, 2),
        (32, 32, 8, 3, 2),
        (32, 32, 4, 3, 3),
        (32, 32, 4, 3, 2),
        (32, 64, 4, 2, 2),
        (32, 32, 8, 4, 2),
        (32, 64, 8, 3, 1),
        (16, 64, 8, 2, 2),
    ],
    # (elements of a stream in a thread, elements of a load, registers)
    "tokens": [(24, 8, 255), (24, 8, 184), (24, 4, 168), (12, 4, 128)],
    # (tokens, columns, warps, stages, programs together)
    "columns": [
        (16, 32, 2, 3, 4),
        (16, 64, 4, 3, 2),
        (16, 64, 4, 2, 2),
        (16, 64, 4, 2, 3),
        (16, 128, 8, 3, 1),
        (32, 32, 4, 3, 2),
    ],
    "weight": [(64, 128, 8, 3, 2), (64, 128, 4, 3, 3), (64, 128, 4, 4, 2), (64, 64, 4, 3, 4)],
}


def use(name: str, plan: Plan) -> None:
    """Make a plan that of its pass, and the first plans those of the others."""
    chosen = {own: plans[0] for own, plans in PLANS.items()} | {name: plan}
    dynamic_streams.plan = lambda *_: dynamic_streams.Plan(*chosen["forward"])
    dynamic_streams_gradient.FIRST_PLAN = dict(
        zip(("per_thread", "vector", "registers"), chosen["tokens"], strict=True)
    )
    dynamic_streams_columns.PLAN = dynamic_streams.Plan(*chosen["columns"])
    dynamic_streams_gradient.WEIGHT_PLAN = dynamic_streams.Plan(*chosen["weight"])


def inputs(rows: int, together: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, f = (torch.randn(rows, *own, DIM, device=DEVICE).to(DTYPE) for own in ((STREAMS,), ()))
    post, comb = (torch.rand(rows, *own, device=DEVICE) + 0.5 for own in ((STREAMS,), (STREAMS, STREAMS)))
    size = (STREAMS * (STREAMS + 2), STREAMS * DIM) if together else (STREAMS + 2, DIM)
    weight = torch.randn(size, device=DEVICE) * 0.02
    scale, base, gain = (torch.rand(size, device=DEVICE) + 0.5 for size in (STREAMS, STREAMS, DIM))
    return [x, f, post, comb, weight, scale, base, gain]


def results(given: list[torch.Tensor], together: bool, kernels: str) -> list[torch.Tensor]:
    """Outputs and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in given]
    x, f, post, comb, weight, scale, base, gain = leaves
    read = DynamicRead(weight, 1e-6, scale, base, "sigmoid" if together else "tanh", inside=together)
    out = dynamic_step(x, f, post, comb, read, Affine("rms", gain, None, 1e-6), kernels=kernels)
    torch.manual_seed(1)
    # Equal numbers for streams of any dtype.
    torch.autograd.backward(out, [torch.randn(o.shape, device=o.device).to(DTYPE).to(o.dtype) for o in out])
    return [*(o.detach() for o in out), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def fault(name: str, plan: Plan, together: bool) -> str:
    """Why a plan cannot be timed, or nothing."""
    try:
        use(name, plan)
        given = inputs(1000, together)
        wide = [t.float() for t in given]
        worst = max(map(_error, results(given, together, "triton"), results(wide, together, "reference")))
    except Exception as error:  # Triton has many ways to say that registers or shared memory are not enough
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    # As in `normlab bench kernels`: eight roundings of the streams' dtype.
    return "" if worst <= 8 * torch.finfo(DTYPE).eps else f"differs from the reference by {worst:.1e}"


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float(((ours - theirs).abs() / (theirs.square().mean().sqrt() + theirs.abs()).clamp_min(1e-6)).max())


def passes(given: list[torch.Tensor], together: bool) -> dict[str, Callable[[], Any]]:
    """Every pass alone, on the same data."""
    x, f, post, comb, weight, scale, base, gain = given
    activation = 1 if together else 2
    use("forward", PLANS["forward"][0])
    state, seen, *saved = dynamic_streams.forward(*given, 1e-6, activation, together, 0.0, 1e-6, False)
    u, inverse, pre, size = saved
    d_state, d_seen, d_u = (torch.randn_like(t) for t in (state, seen, u))
    tokens = (state, d_seen, u, inverse, pre, size, d_u, scale, base, gain, activation, together, False)
    numbers, _ = dynamic_streams_gradient._by_tokens(*tokens)
    columns = (x, f, post, comb, weight, gain, False, pre, size, *numbers, d_state, d_seen)
    return {
        "forward": lambda: dynamic_streams.forward(*given, 1e-6, activation, together, 0.0, 1e-6, False),
        "tokens": lambda: dynamic_streams_gradient._by_tokens(*tokens),
        "columns": lambda: dynamic_streams_columns.gradients(*columns),
        "weight": lambda: dynamic_streams_gradient._of_weight(state, numbers[0], weight),
    }


@cache
def copy(moved: int) -> float:
    return copy_bandwidth(DEVICE, moved)


def main() -> None:
    jobs = [(name, plan, together) for together in (True, False) for name, own in PLANS.items() for plan in own]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        faults = dict(zip(jobs, pool.map(fault, *zip(*jobs, strict=True)), strict=True))
    for together in (True, False):
        calls = passes(inputs(ROWS, together), together)
        for name, plan in ((name, plan) for name, own in PLANS.items() for plan in own):
            title = f"{'mhc' if together else 'hc':3s} {name:7s} {plan!s:18s}"
            if faults[name, plan, together]:
                print(f"{title} left out: {faults[name, plan, together]}", flush=True)
                continue
            use(name, plan)
            moved = TENSORS[name] * ROWS * DIM * DTYPE.itemsize
            seconds = measure(calls[name], DEVICE, repeats=15).median
            share = moved / seconds / copy(moved)
            print(f"{title} {1e6 * seconds:7.1f} µs, {share:.3f} of copy", flush=True)


if __name__ == "__main__":
    main()
