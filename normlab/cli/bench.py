"""`normlab bench` on the command line. Nothing here imports torch before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def bench() -> None:
    """Measure speed: `bench kernels` for the fused steps, `bench step` for whole training steps."""


def bench_kernels(only: str = "", cpu: bool = False, out: Path | None = None, plot: Path | None = None) -> None:
    """Time every fused step: share of the copy bandwidth, ratio to eager PyTorch, torch.compile, Liger and quack.

    Args:
        only: Just the steps whose name contains this, e.g. geodesic.
        cpu: Without a GPU: the plain reference against torch.compile.
        out: Keep the figures in this JSON file.
        plot: Draw them into this .svg, .png or .pdf file.
    """
    from normlab.bench import run

    run.kernels(only=only, cpu=cpu, out=out, plot=plot)


def bench_step(
    schemes: tuple[str, ...] = (),
    preset: str = "125m",
    batch: int = 32,
    length: int = 1024,
    stream: Literal["fp32", "bf16"] = "bf16",
    repeats: int = 5,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time whole training steps of every scheme beside Pre-Norm, compiled, in bf16.

    Args:
        schemes: Which ones; all of them if none is named.
        preset: Size of the model.
        batch: Sequences a step.
        length: Tokens a sequence.
        stream: Number format of the residual stream.
        repeats: How often each scheme has its turn.
        out: Keep the figures in this JSON file.
        plot: Draw them into this .svg, .png or .pdf file.
    """
    from normlab import list_schemes
    from normlab.bench import run

    options = {"batch": batch, "length": length, "stream": stream, "repeats": repeats}
    run.step(schemes or list_schemes(), preset=preset, **options, out=out, plot=plot)  # type: ignore[arg-type]
