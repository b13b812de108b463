"""`normlab bench`: run a benchmark of kernels, training steps or many runs, print its table and write its results."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

from normlab.bench import grid as grid_bench
from normlab.bench import kernels as kernel_bench
from normlab.bench import results_file, step_peers
from normlab.bench import step as step_bench
from normlab.bench.data_sheet import data_sheet_flops
from normlab.bench.grid_worker import Shape
from normlab.bench.plot import check_format, draw_kernels, draw_steps
from normlab.errors import NormLabError
from normlab.models import DecoderConfig
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.train.hardware import matmul_ceiling
from normlab.utils.progress import ProgressDisplay


def kernels(
    *,
    only: str = "",
    shapes: Iterable[str] = (),
    cpu: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
) -> list[dict[str, Any]]:
    """Benchmark every fused step against the copy bandwidth, torch.compile and other libraries."""
    chosen = [kernel_bench.parse_shape(shape) for shape in shapes]
    device = _device(cpu, "the reference against torch.compile")
    results_file.check_writable(out)
    _check_plot(plot)
    if not kernel_bench.plan(device, only):
        known = ", ".join(case.name for case in kernel_bench.CASES)
        raise NormLabError(f"no step's name contains {only!r}; known: {known}")
    found = results_file.kept(out)
    todo = kernel_bench.plan(device, only, {(row["case"], tuple(row["shape"])) for row in found}, chosen)
    failed = _measure_kernels(device, todo, found, out)
    Console(width=120).print(_kernel_table(found))
    results_file.keep(out, found, complete=not failed)
    _draw(plot if found else None, draw_kernels, found)
    _refuse(failed, len(todo))
    return found


def _measure_kernels(
    device: torch.device, todo: list[kernel_bench.Place], found: list[dict[str, Any]], out: Path | None
) -> dict[kernel_bench.Place, str]:
    """Append rows to `found`, and store them as they come; returns the places that could not be compiled, and why."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    failed = kernel_bench.compile_ahead(dtype, todo, _say) if device.type == "cuda" else {}
    todo = [place for place in todo if place not in failed]
    for row in _track(kernel_bench.rows(device, dtype, todo), "timing", 2 * len(todo)):
        found.append(row.to_dict())
        # Store both directions together: an interrupted benchmark continues from here.
        if row.direction == "backward":
            results_file.keep(out, found, complete=False)
    return failed


def _refuse(failed: dict[kernel_bench.Place, str], total: int) -> None:
    """Raise if something was not measured, after everything else was."""
    if failed:
        place, reason = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more, each named above" if len(failed) > 1 else ""
        raise NormLabError(
            f"{len(failed)} of {total} places are not measured: {kernel_bench.name_of(place)} ({reason}){more}"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _kernel_table(found: list[dict[str, Any]]) -> Table:
    peers = ("eager", "compiled", "liger", "quack")
    table = Table("step", "shape", "direction", "µs", "GB/s", "of copy", *(f"× {p}" for p in peers), pad_edge=False)
    for row in found:
        ratios = [f"{row[f'over_{p}']:.2f}" if f"over_{p}" in row else "–" for p in peers]
        median, low, high = (1e6 * row["fused"][name] for name in ("median", "low", "high"))
        speed = (f"{median:.0f} ({low:.0f}–{high:.0f})", f"{row['gb_per_s']:.0f}", f"{row['share']:.2f}")
        table.add_row(row["case"], "×".join(map(str, row["shape"])), row["direction"], *speed, *ratios)
    return table


def step(
    schemes: Iterable[str],
    *,
    preset: str,
    batch: int,
    length: int,
    stream: str,
    repeats: int = 5,
    peers: bool = False,
    graphs: bool = True,
    compile_limit: float = 300.0,
    out: Path | None = None,
    plot: Path | None = None,
) -> list[dict[str, Any]]:
    """Benchmark training steps of schemes, and of other trainers, relative to the faster of two Pre-Norm baselines."""
    # Check all names before any model is built.
    schemes = [str(find_scheme(name)) for name in schemes]
    DecoderConfig.preset(preset)
    _check_counts(batch=batch, length=length, repeats=repeats)
    if not torch.cuda.is_available():
        raise NormLabError("no GPU here: bench step needs one; try normlab bench kernels --cpu")
    results_file.check_writable(out)
    _check_plot(plot)
    names = [step_bench.BASELINE, ("pre", "reference"), *((s, "triton") for s in schemes if s != "pre")]
    ours = step_bench.scheme_entrants(names, preset=preset, length=length, stream=stream, graphs=graphs)
    others = step_peers.peers(ours[0].config) if peers else []
    bench, limits = step_bench.Comparison([*ours, *others], batch=batch, compile_limit=compile_limit), _limits()
    _build(bench)
    for _ in _follow(bench, bench.time(repeats), "timing", repeats):
        results_file.keep(out, _beside_pre(bench.rows(), limits), complete=False)
    found = _beside_pre(bench.rows(), limits)
    Console(width=140).print(_step_table(found))
    missing = {entrant.name: bench.failed[entrant.name] for entrant in ours if entrant.name in bench.failed}
    packages = [peer.package for peer in others if peer.package is not None and peer.name not in bench.failed]
    left_out = {step_bench.title(name): reason for name, reason in bench.failed.items()}
    results_file.keep(out, found, *packages, complete=not missing, left_out=left_out, **limits)
    _draw(plot, draw_steps, found)
    _refuse_schemes(missing)
    return found


def _build(bench: step_bench.Comparison) -> None:
    for name in _follow(bench, bench.build(), "compiling", len(bench.entrants)):
        if name in bench.facts:
            _say(f"{step_bench.title(name)} is compiled after {bench.compile_seconds[name]:.0f} s")


def _limits() -> dict[str, float | None]:
    """FLOP/s of bf16 matrix products: measured now, while the GPU does nothing else, and from the data sheet."""
    ceiling = matmul_ceiling(torch.device("cuda"), torch.bfloat16)
    # The contenders need the memory.
    torch.cuda.empty_cache()
    return {"ceiling": ceiling, "data_sheet": data_sheet_flops(torch.cuda.get_device_name())}


def _follow(bench: step_bench.Comparison, part: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """Track a part of the benchmark, then name the contenders that failed in it."""
    before = set(bench.failed)
    yield from _track(part, what, total)
    for name, reason in bench.failed.items():
        if name not in before:
            _say(f"{step_bench.title(name)} is left out: {reason}")


def _refuse_schemes(missing: dict[step_bench.Name, str]) -> None:
    """Raise if a scheme was not measured, after everything else was. A peer may be missing."""
    if missing:
        reasons = ", ".join(f"{step_bench.title(name)}: {reason}" for name, reason in missing.items())
        raise NormLabError(f"{len(missing)} of the schemes asked for are not measured: {reasons}")


def _beside_pre(rows: list[step_bench.StepRow], limits: dict[str, float | None]) -> list[dict[str, Any]]:
    """Rows with speed relative to the faster Pre-Norm, with Triton or with reference kernels, and to the GPU's."""
    yard = rows[0]
    faster = max(statistics.median(row.ratios) for row in rows if row.scheme == "pre")
    return [
        row.to_dict()
        | {
            "over_pre": statistics.median(row.ratios) / faster,
            "paired": [ratio / faster for ratio in row.ratios],
            "memory_over_pre": row.peak_bytes / yard.peak_bytes,
            "share_of_ceiling": _share(row, limits["ceiling"]),
            "mfu": _share(row, limits["data_sheet"]),
        }
        for row in rows
    ]


def _share(row: step_bench.StepRow, limit: float | None) -> float | None:
    return None if limit is None else row.flops_per_second / limit


def _step_table(found: list[dict[str, Any]]) -> Table:
    titles = ("× pre", "lowest", "highest", "memory × pre", "of ceiling", "MFU, data sheet")
    table = Table("model", "kernels", "parameters", "tokens/s", *titles, pad_edge=False)
    for row in found:
        ratios = (row["over_pre"], min(row["paired"]), max(row["paired"]), row["memory_over_pre"])
        shares = ("–" if share is None else f"{share:.1%}" for share in (row["share_of_ceiling"], row["mfu"]))
        counts = (f"{row['parameters'] / 1e6:,.1f}M", f"{row['median']:,.0f}")
        table.add_row(row["scheme"], row["kernels"], *counts, *(f"{ratio:.3f}" for ratio in ratios), *shares)
    return table


def grid(
    sizes: Iterable[str] = (),
    *,
    at_once: Iterable[int] = (),
    quick: bool = False,
    cpu: bool = False,
    batch: int | None = None,
    length: int | None = None,
    vocabulary: int | None = None,
    out: Path | None = None,
    seconds: float | None = None,
    processes: bool = True,
) -> list[dict[str, Any]]:
    """Benchmark many runs of small models on one GPU; `seconds`: length of one measurement.

    What is not given is tiny on a CPU.
    """
    if not cpu and not torch.cuda.is_available():
        raise NormLabError("no GPU here: bench grid needs one; --cpu shows at tiny sizes what it would print")
    results_file.check_writable(out)
    usual = (grid_bench.QUICK_SIZES, grid_bench.QUICK_AT_ONCE) if quick else (grid_bench.SIZES, grid_bench.AT_ONCE)
    few = (grid_bench.TINY_SIZES, grid_bench.TINY_AT_ONCE) if cpu else usual
    chosen, counts = tuple(sizes) or few[0], tuple(at_once) or few[1]
    if min(counts) < 1:
        raise NormLabError(f"at_once must be at least 1, got {min(counts)}; try 1 2 3")
    _check_counts(batch=batch, length=length, vocabulary=vocabulary)
    place = (*grid_bench.filled((vocabulary, length, batch), cpu), "pre", "cpu" if cpu else "cuda")
    shapes = [Shape(*grid_bench.parse_size(size), *place) for size in chosen]
    bench = grid_bench.GridBench(shapes, counts, seconds=seconds or (1.0 if quick else 2.0), processes=processes)
    for line in bench.measure():
        _say(line)
    found = [row.to_dict() for row in bench.rows]
    Console(width=160).print(grid_bench.grid_table(found))
    print("\n".join(grid_bench.verdicts(found)))
    results_file.keep(out, found, complete=True)
    return found


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise NormLabError(f"{name} must be at least 1, got {count}; leave it out")


def _device(cpu: bool, offered: str) -> torch.device:
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NormLabError(f"no GPU here: Triton kernels cannot be timed; --cpu compares {offered}")
    return torch.device("cuda")


def _track(rows: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """Show progress on standard error, so that standard output can be piped."""
    live = ProgressDisplay(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), progress=True)
    task = live.bar.add_task(what, total=total) if live.bar is not None else None
    try:
        for done, row in enumerate(rows, 1):
            yield row
            if live.bar is not None and task is not None:
                live.bar.update(task, completed=done)
            elif live.is_due or done == total:
                live.say(f"{what} {done}/{total}")
    finally:
        live.close()


def _check_plot(plot: Path | None) -> None:
    results_file.check_writable(plot)
    if plot is not None:
        check_format(plot)


def _draw(plot: Path | None, draw: Callable[[list[dict[str, Any]], Path], None], rows: list[dict[str, Any]]) -> None:
    if plot is not None:
        draw(rows, plot)
        print(f"plot in {plot}")
