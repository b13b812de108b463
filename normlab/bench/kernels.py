"""Kernel benchmarks: parity with the reference, then time against copy bandwidth, torch.compile and peers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from normlab.bench import peers
from normlab.bench.cases import CASES, Case, Outputs
from normlab.bench.timing import Timing, copy_bandwidth, measure
from normlab.errors import NormLabError

SHAPES = ((65536, 768), (32768, 1024), (32768, 2048), (16384, 4096), (8192, 8192))
CPU_SHAPES = ((2048, 768), (1024, 2048))

_CORES = 2
"""CPU cores used by one compilation."""


@dataclass(frozen=True)
class Row:
    """The result of one case at one shape in one direction."""

    case: str
    shape: tuple[int, int]
    direction: str
    bytes_moved: int
    copy: float
    """Bytes per second of a copy of as many bytes, in the same run."""
    fused: Timing
    others: dict[str, Timing]
    """Timings of eager PyTorch, torch.compile, and the public kernels that are installed."""

    @property
    def share(self) -> float:
        """Achieved bandwidth as a fraction of the copy bandwidth."""
        return self.bytes_moved / self.fused.median / self.copy

    def to_dict(self) -> dict[str, Any]:
        ratios = {f"over_{name}": time.median / self.fused.median for name, time in self.others.items()}
        return asdict(self) | {"gb_per_s": self.bytes_moved / self.fused.median / 1e9, "share": self.share, **ratios}


Place = tuple[str, tuple[int, int]]
"""A case and a shape, which are measured together."""


def rows(device: torch.device, dtype: torch.dtype, places: list[Place]) -> Iterator[Row]:
    """Measure both directions of every case and shape. On a CPU the reference replaces the kernel."""
    for place in places:
        yield from _rows(place, device, dtype)


def plan(device: torch.device, only: str = "", done: Container[Place] = ()) -> list[Place]:
    """The measurements to do: every case at every shape that is not `done`."""
    shapes = SHAPES if device.type == "cuda" else CPU_SHAPES
    places = [(case.name, shape) for case in CASES if only in case.name for shape in shapes]
    return [place for place in places if place not in done]


def compile_ahead(dtype: torch.dtype, places: list[Place]) -> Iterator[Place]:
    """Compile everything in parallel processes, which takes most of the time; later measurements use the cache."""
    workers = min(len(places), max(1, (os.cpu_count() or 1) // _CORES))
    # Otherwise the compiler of every worker would start one worker per core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile, place, dtype): place for place in places}
        for future in as_completed(futures):
            future.result()
            yield futures[future]


def _compile(place: Place, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    calls, inputs, _ = _calls(place, device, dtype)
    with torch.no_grad():
        calls["compiled"]()
    outputs = calls["compiled"]()
    upstream = [torch.ones_like(output) for output in outputs]
    # As it is timed later: without retain_graph the compiler reuses the memory of saved tensors.
    torch.autograd.grad(outputs, inputs, upstream, retain_graph=True, allow_unused=True)
    torch.cuda.empty_cache()


def _calls(
    place: Place, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], Outputs]], list[Tensor], Case]:
    """The functions to time, after a parity check, with their inputs and the case."""
    torch._dynamo.reset()
    case, shape = next(case for case in CASES if case.name == place[0]), place[1]
    step, parameters = case.build(shape, device)
    x, g = case.inputs(shape, device, dtype)
    fused = "triton" if device.type == "cuda" else "reference"
    calls: dict[str, Callable[[], Outputs]] = {
        "fused": lambda: step(x, g, fused),
        "eager": lambda: step(x, g, "reference"),
        "compiled": torch.compile(lambda: step(x, g, "reference")),
    }
    inputs = [x, g, *parameters]
    _check_parity(case.name, calls["fused"], calls["eager"], inputs)
    if device.type == "cuda":
        found = peers.calls(case.name, x, g, parameters)
        calls |= {name: call for name, call in found.items() if _is_peer(name, call, calls["eager"], inputs)}
    return calls, inputs, case


def _rows(place: Place, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    calls, inputs, case = _calls(place, device, dtype)
    for direction, count in (("forward", case.forward), ("backward", case.backward)):
        moved = count * inputs[1].numel() * dtype.itemsize
        copy = copy_bandwidth(device, moved)
        times = {name: _time(call, direction, inputs, device) for name, call in calls.items()}
        yield Row(case.name, place[1], direction, moved, copy, times.pop("fused"), times)


def _time(call: Callable[[], Outputs], direction: str, inputs: list[Tensor], device: torch.device) -> Timing:
    if direction == "forward":
        with torch.no_grad():
            return measure(call, device)
    outputs = call()
    upstream = [torch.randn_like(output) for output in outputs]
    return measure(lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True, allow_unused=True), device)


def _is_peer(name: str, call: Callable[[], Outputs], reference: Callable[[], Outputs], inputs: list[Tensor]) -> bool:
    """Whether another library's kernel gives the same results; one that fails or differs is reported and not timed."""
    try:
        _check_parity(name, call, reference, inputs)
    except Exception as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return False
    return True


def _check_parity(
    name: str, fused: Callable[[], Outputs], reference: Callable[[], Outputs], inputs: list[Tensor]
) -> None:
    """Raise unless outputs and gradients agree within a few rounding errors of the stream's dtype."""
    found = []
    for call in (fused, reference):
        outputs = call()
        upstream = [torch.ones_like(output) * 0.5 for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)
        found.append([t.detach() for t in (*outputs, *gradients) if t is not None])
    for ours, theirs in zip(*found, strict=True):
        scale = theirs.float().square().mean().sqrt() + theirs.float().abs()
        # Gradients of gains are fp32 sums over values of the stream's dtype.
        rounding = max(torch.finfo(inputs[0].dtype).eps, 1e-5)
        error = ((ours.float() - theirs.float()).abs() / scale.clamp_min(1e-6)).max()
        if not error <= 8 * rounding:
            raise NormLabError(f"{name} and the reference differ by {float(error):.2e}; no speed is reported")
