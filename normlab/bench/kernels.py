"""Kernel benchmarks: parity with the reference, then time against copy bandwidth, torch.compile and peers."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
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

_BYTES = 80
"""GPU memory of one compilation, per element of the state: eager code in half precision holds 47 at once with four
streams (counted on a CPU), and the parity check, whose reference is fp32, and what the allocator keeps come on top."""

_PATIENCE = 15.0
"""Seconds without a finished compilation after which a line says what is under way."""


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


def parse_shape(text: str) -> tuple[int, int]:
    """Tokens and width from text like 65536x768."""
    match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise NormLabError(f"{text!r} is not a shape; expected tokens x width, e.g. 65536x768")
    return int(match[1]), int(match[2])


def plan(
    device: torch.device, only: str = "", done: Container[Place] = (), shapes: Sequence[tuple[int, int]] = ()
) -> list[Place]:
    """The measurements to do: every case at every shape, or at `shapes`, that is not `done`."""
    shapes = shapes or (SHAPES if device.type == "cuda" else CPU_SHAPES)
    places = [(case.name, shape) for case in CASES if only in case.name for shape in dict.fromkeys(shapes)]
    return [place for place in places if place not in done]


def name_of(place: Place) -> str:
    """Label of a measurement: case and shape, e.g. geodesic 65536×768."""
    return f"{place[0]} {place[1][0]}×{place[1][1]}"


def compile_ahead(dtype: torch.dtype, places: list[Place], say: Callable[[str], None]) -> dict[Place, str]:
    """Compile everything in parallel processes, which takes most of the time; later measurements use the cache.

    Returns the places that cannot be measured, with the reason: one failure must not cost a short session the rest.
    """
    failed: dict[Place, str] = {}
    if not places:
        return failed
    workers, begin = _workers(places), time.perf_counter()
    # Otherwise the compiler of every worker would start one worker per core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES))
    say(f"compiling {len(places)} places in {workers} processes")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_try_compile, place, dtype): place for place in places}
        try:
            for done, future in enumerate(_finished(futures, say), 1):
                place, (seconds, error) = futures[future], future.result()
                failed |= {place: error} if error else {}
                what = f"{name_of(place)}, " + (f"failed: {error}" if error else f"{seconds:.0f} s")
                say(f"compiled {done}/{len(places)} after {time.perf_counter() - begin:.0f} s: {what}")
        except BaseException:
            # Leaving the pool waits for all that was submitted, and says nothing meanwhile.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _workers(places: list[Place]) -> int:
    """Processes that compile at once: as many as cores and GPU memory allow."""
    streams = {case.name: case.streams for case in CASES}
    largest = max(_BYTES * streams[name] * rows * dim for name, (rows, dim) in places)
    fit = torch.cuda.mem_get_info()[0] // largest
    return max(1, min(len(places), (os.cpu_count() or 1) // _CORES, fit))


def _finished(futures: dict[Future[Any], Place], say: Callable[[str], None]) -> Iterator[Future[Any]]:
    """Yield compilations as they finish; print progress lines in between."""
    waiting, begin = set(futures), time.perf_counter()
    while waiting:
        done, waiting = wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
        if not done:
            under_way = [name_of(futures[future]) for future in futures if future in waiting and future.running()]
            say(f"still compiling after {time.perf_counter() - begin:.0f} s: {'; '.join(under_way)}")
        yield from done


def _try_compile(place: Place, dtype: torch.dtype) -> tuple[float, str]:
    """Returns (seconds, error as one line of text): not every exception of a compiler can be pickled."""
    begin = time.perf_counter()
    try:
        _compile(place, dtype)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        text = line if isinstance(error, NormLabError) else f"{type(error).__name__}: {line}"
        return time.perf_counter() - begin, text
    return time.perf_counter() - begin, ""


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
    wide, update = (t.detach().float().requires_grad_() for t in (x, g))
    expected = _results(lambda: step(wide, update, "reference"), [wide, update, *parameters])
    _check_parity(case.name, calls["fused"], inputs, expected)
    if device.type == "cuda":
        found = peers.calls(case.name, x, g, parameters)
        calls |= {name: call for name, call in found.items() if _is_peer(name, call, inputs, expected)}
    return calls, inputs, case


def _rows(place: Place, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    calls, inputs, case = _calls(place, device, dtype)
    for direction, moved in case.bytes_moved(place[1], dtype).items():
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


def _is_peer(name: str, call: Callable[[], Outputs], inputs: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether another library's kernel gives the same results; one that fails or differs is reported and not timed."""
    try:
        _check_parity(name, call, inputs, expected)
    except Exception as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return False
    return True


def _results(call: Callable[[], Outputs], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    outputs = call()
    upstream = [torch.ones_like(output) * 0.5 for output in outputs]
    gradients = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)
    return [t.detach() for t in (*outputs, *gradients) if t is not None]


def _check_parity(name: str, call: Callable[[], Outputs], inputs: list[Tensor], expected: list[Tensor]) -> None:
    """Raise unless outputs and gradients are the expected ones within a few rounding errors of the stream's dtype.

    What is expected is computed in fp32: sums over all tokens whose terms cancel, such as the gradients of shared
    coefficients, magnify the roundings of a reference that stores every intermediate result in half precision.
    """
    for ours, theirs in zip(_results(call, inputs), expected, strict=True):
        scale = theirs.float().square().mean().sqrt() + theirs.float().abs()
        # Gradients of gains are fp32 sums over values of the stream's dtype.
        rounding = max(torch.finfo(inputs[0].dtype).eps, 1e-5)
        error = ((ours.float() - theirs.float()).abs() / scale.clamp_min(1e-6)).max()
        if not error <= 8 * rounding:
            raise NormLabError(f"{name} and the reference differ by {float(error):.2e}; no speed is reported")
