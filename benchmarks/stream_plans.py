"""Launch plans of the backward kernel of several residual streams, timed side by side on a GPU.

    python benchmarks/stream_plans.py

Four streams in bf16. A plan is (warps of a program, elements of a chunk in a thread, programs on a multiprocessor,
pipeline stages); `default` is what `normlab/kernels/fused/streams_gradient.py` takes. Parity with the reference is
checked first, in parallel processes that also compile; a plan that fails is named and not timed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import triton

from normlab.bench.timing import copy_bandwidth, measure
from normlab.kernels.fused import launch, streams, streams_gradient
from normlab.kernels.residual import KINDS, Affine
from normlab.kernels.streams import read_streams, write_and_read_streams, write_streams

Plan = tuple[int, int, int, int]
STREAMS, DTYPE, DEVICE = 4, torch.bfloat16, torch.device("cuda")
TENSORS = {"step": 15, "write": 14, "read": 13}
"""Tensors of one stream that each kind of backward pass must move."""

PLANS: dict[tuple[int, int], dict[str, list[Plan | None]]] = {
    (65536, 768): {
        "step": [
            None,
            (2, 4, 4, 3),
            (2, 4, 4, 4),
            (2, 4, 5, 3),
            (2, 4, 6, 2),
            (2, 8, 4, 3),
            (4, 8, 3, 3),
            (1, 8, 8, 2),
        ],
        "write": [None, (1, 8, 7, 3), (1, 8, 10, 2), (1, 8, 12, 2), (2, 4, 7, 2), (2, 4, 7, 3), (2, 8, 6, 3)],
        "read": [None, (2, 4, 5, 3), (2, 4, 7, 2), (1, 8, 8, 2), (1, 8, 7, 3)],
    },
    (32768, 2048): {
        "step": [None, (4, 4, 2, 3), (4, 8, 2, 2), (4, 8, 2, 3)],
        "write": [None, (2, 8, 3, 3), (4, 4, 5, 2), (4, 8, 3, 3)],
        "read": [None, (4, 4, 2, 2), (4, 8, 2, 3)],
    },
    (16384, 4096): {
        "step": [None, (8, 8, 1, 3), (8, 4, 1, 2), (16, 4, 1, 3)],
        "write": [None, (4, 8, 2, 2), (4, 8, 1, 3), (8, 4, 3, 2), (8, 8, 1, 4)],
        "read": [None, (8, 8, 1, 3), (8, 4, 1, 2)],
    },
}
_DEFAULT = streams_gradient._walk


def backward(plan: Plan | None) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The backward pass under a plan."""

    def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
        streams_gradient._walk = _DEFAULT if plan is None else walk
        return streams_gradient.backward(*arguments)

    def walk(x: torch.Tensor, loads: list[torch.Tensor | None], **_modes: bool) -> launch.Sweep:
        assert plan is not None
        warps, vector, together, stages = plan
        rows, _, dim = streams.sizes(x)
        block = min(32 * warps * vector, triton.next_power_of_2(dim))
        tile = launch.Tile(32 * warps * vector // block, block, warps)
        registers = min(255, 65536 // (32 * warps * together) // 8 * 8)
        programs = launch._programs(triton.cdiv(rows, tile.rows), together, loads)
        return launch.Sweep(tile, programs, stages, registers)

    return run


def inputs(mode: str, rows: int, dim: int) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
    """Arguments of the backward pass but for the upstream gradients, and these."""
    torch.manual_seed(0)
    x, f = (torch.randn(rows, *own, dim, device=DEVICE).to(DTYPE) for own in ((STREAMS,), ()))
    tokens = () if mode == "step" else (rows,)
    shapes = ((*tokens, STREAMS), (*tokens, STREAMS, STREAMS), (*tokens, STREAMS), (dim,))
    post, comb, pre, gain = (torch.rand(*shape, device=DEVICE) + 0.5 for shape in shapes)
    norm, no_norm = (gain, None, KINDS["rms"], 1e-6, False), (None, None, KINDS["scale"], 0.0, False)
    made = {
        "step": (x, f, post, comb, pre, *norm),
        "write": (x, f, post, comb, None, *no_norm),
        "read": (x, None, None, None, pre, *norm),
    }[mode]
    seen = None if mode == "write" else torch.randn(rows, dim, device=DEVICE).to(DTYPE)
    return made, [torch.randn_like(x), seen]


def reference(mode: str, made: tuple[Any, ...], upstream: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The same gradients by autograd through the reference."""
    leaves: list[Any] = [None if t is None else t.detach().clone().requires_grad_() for t in made[:6]]
    x, f, post, comb, pre, gain = leaves
    norm = None if gain is None else Affine("rms", gain, None, 1e-6)
    if mode == "step":
        out = write_and_read_streams(x, f, post, comb, pre, norm, kernels="reference")
    elif mode == "write":
        out = (write_streams(x, f, post, comb, kernels="reference"),)
    else:
        out = read_streams(x, pre, norm, kernels="reference")
    torch.autograd.backward(list(out), [u for u in upstream if u is not None])
    return [t.grad for t in leaves if t is not None]


def fault(mode: str, dim: int, plan: Plan | None) -> str:
    """Why a plan cannot be timed, or nothing."""
    try:
        made, upstream = inputs(mode, 1000, dim)
        ours = [gradient for gradient in backward(plan)(*made, *upstream) if gradient.numel()]
        worst = max(map(_error, ours, reference(mode, made, upstream)))
    except Exception as error:  # Triton has many ways to say that registers or shared memory are not enough
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    # As in `normlab bench kernels`: eight roundings of the streams' dtype.
    return "" if worst <= 8 * torch.finfo(DTYPE).eps else f"differs from the reference by {worst:.1e}"


def _error(ours: torch.Tensor, theirs: torch.Tensor | None) -> float:
    assert theirs is not None
    ours, theirs = ours.float().reshape(theirs.shape), theirs.float()
    scale = theirs.square().mean().sqrt() + theirs.abs()
    return float(((ours - theirs).abs() / scale.clamp_min(1e-6)).max())


def main() -> None:
    jobs = [(mode, shape, plan) for shape, modes in PLANS.items() for mode, own in modes.items() for plan in own]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        faults = list(pool.map(fault, *zip(*((mode, shape[1], plan) for mode, shape, plan in jobs), strict=True)))
    for (mode, (rows, dim), plan), why in zip(jobs, faults, strict=True):
        name = f"{rows}x{dim} {mode:5s} {'default' if plan is None else str(plan):16s}"
        if why:
            print(f"{name} left out: {why}", flush=True)
            continue
        made, upstream = inputs(mode, rows, dim)
        moved = TENSORS[mode] * rows * dim * DTYPE.itemsize
        seconds = measure(partial(backward(plan), *made, *upstream), DEVICE, repeats=25).median
        share = moved / seconds / copy_bandwidth(DEVICE, moved)
        print(f"{name} {1e6 * seconds:7.1f} µs, {share:.3f} of copy", flush=True)


if __name__ == "__main__":
    main()
