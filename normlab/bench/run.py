"""`normlab bench`: measure, print a table, keep the figures as JSON with all it takes to repeat them."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from normlab.bench import kernels as kernel_bench
from normlab.bench import step as step_bench
from normlab.bench.plot import check_format, draw_kernels, draw_steps
from normlab.errors import NormLabError
from normlab.files import write_json
from normlab.models import DecoderConfig
from normlab.schemes.registry import scheme as find_scheme
from normlab.versions import versions


def kernels(
    *, only: str = "", cpu: bool = False, out: Path | None = None, plot: Path | None = None
) -> list[dict[str, Any]]:
    """Every fused step against the copy bandwidth and its peers."""
    device = _device(cpu, "the reference against torch.compile")
    _check_out(out)
    _check_plot(plot)
    peers = ("eager", "compiled", "liger", "quack")
    table = Table("step", "shape", "direction", "µs", "GB/s", "of copy", *(f"× {p}" for p in peers), pad_edge=False)
    found: list[dict[str, Any]] = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for row in _track(kernel_bench.rows(device, dtype, only), "timing", kernel_bench.count(device, only)):
        facts = row.to_dict()
        found.append(facts)
        ratios = [f"{facts[f'over_{p}']:.2f}" if f"over_{p}" in facts else "–" for p in peers]
        time = f"{row.fused.median * 1e6:.0f} ({row.fused.low * 1e6:.0f}–{row.fused.high * 1e6:.0f})"
        speed = (time, f"{facts['gb_per_s']:.0f}", f"{row.share:.2f}")
        table.add_row(row.case, "×".join(map(str, row.shape)), row.direction, *speed, *ratios)
    if not found:
        known = ", ".join(case.name for case in kernel_bench.CASES)
        raise NormLabError(f"no step's name contains {only!r}; known: {known}")
    Console(width=120).print(table)
    _keep(out, "kernels", found)
    _draw(plot, draw_kernels, found)
    return found


def step(
    schemes: Iterable[str],
    *,
    preset: str,
    batch: int,
    length: int,
    stream: str,
    repeats: int = 5,
    out: Path | None = None,
    plot: Path | None = None,
) -> list[dict[str, Any]]:
    """Whole training steps, beside the faster Pre-Norm."""
    # Names first: a typo must not wait for the models before it to be built.
    schemes = [str(find_scheme(name)) for name in schemes]
    DecoderConfig.preset(preset)
    if not torch.cuda.is_available():
        raise NormLabError("no GPU here: bench step needs one; try normlab bench kernels --cpu")
    _check_out(out)
    _check_plot(plot)
    pairs = [("pre", "reference"), ("pre", "triton"), *((s, "triton") for s in schemes if s != "pre")]
    bench = step_bench.Comparison(pairs, preset=preset, batch=batch, length=length, stream=stream)
    for _ in _track(bench.build(), "compiling", len(pairs)):
        pass
    for _ in _track(bench.time(repeats), "timing", repeats * len(pairs)):
        pass
    rows = bench.rows()
    base = max(rows[:2], key=lambda row: row.median)
    table = Table("scheme", "kernels", "tokens/s", "× pre", "lowest", "highest", "memory × pre", pad_edge=False)
    found = []
    for row in rows:
        # Pairs of neighbours in time: what slows the machine for a moment slows both.
        paired = [a / b for a, b in zip(row.tokens_per_second, base.tokens_per_second, strict=True)]
        ratio, memory = row.median / base.median, row.peak_bytes / base.peak_bytes
        cells = [f"{row.median:,.0f}", f"{ratio:.3f}", f"{min(paired):.3f}", f"{max(paired):.3f}", f"{memory:.3f}"]
        table.add_row(row.scheme, row.kernels, *cells)
        found.append(row.to_dict() | {"over_pre": ratio, "paired": paired, "memory_over_pre": memory})
    Console(width=120).print(table)
    _keep(out, "step", found)
    _draw(plot, draw_steps, found)
    return found


def _device(cpu: bool, offered: str) -> torch.device:
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NormLabError(f"no GPU here: Triton kernels cannot be timed; --cpu compares {offered}")
    return torch.device("cuda")


def _track(rows: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Progress on standard error, so that figures can be piped on."""
    return track(rows, what, total=total, console=Console(stderr=True), transient=True)


def _check_out(out: Path | None) -> None:
    """Figures that cannot be kept are better not measured."""
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise NormLabError(f"cannot write to {out.parent}: {error.strerror}; name another file with --out") from None
    if out.is_dir():
        raise NormLabError(f"{out} is a folder; expected a file, e.g. {out / 'figures.json'}")


def _check_plot(plot: Path | None) -> None:
    _check_out(plot)
    if plot is not None:
        check_format(plot)


def _draw(plot: Path | None, draw: Callable[[list[dict[str, Any]], Path], None], rows: list[dict[str, Any]]) -> None:
    if plot is not None:
        draw(rows, plot)
        print(f"plot in {plot}")


def _without_places(words: list[str]) -> list[str]:
    """The command without the files that one machine kept its results in: they decide nothing."""
    places = {i + k for i, word in enumerate(words) if word in ("--out", "--plot") for k in (0, 1)}
    return [word for i, word in enumerate(words) if i not in places and not word.startswith(("--out=", "--plot="))]


def _keep(out: Path | None, name: str, rows: list[dict[str, Any]]) -> None:
    """Write the figures atomically, with command, hardware and versions."""
    if out is None:
        return
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["normlab", *_without_places(sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        **versions(),
        "rows": rows,
    }
    write_json(out, facts)
    print(f"{name}: figures in {out}")
