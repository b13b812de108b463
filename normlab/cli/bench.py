"""The commands `normlab bench kernels`, `bench step` and `bench grid`. Importing this does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def bench() -> None:
    """Benchmark speed: `bench kernels` (fused kernels), `bench step` (a training step) or `bench grid` (many runs)."""


def bench_kernels(
    only: str = "",
    shapes: tuple[str, ...] = (),
    cpu: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Benchmark the fused kernels against copy bandwidth, eager PyTorch, torch.compile, Liger and quack.

    For example:
      normlab bench kernels --only geodesic --shapes 65536x768 --out kernels.json
      normlab bench kernels --cpu

    Args:
        only: Only kernels whose name contains this text, e.g. geodesic.
        shapes: Tokens x width, e.g. 65536x768 32768x2048; none: five shapes, or two small ones on a CPU.
        cpu: Without a GPU: the reference implementation against torch.compile.
        out: Write the results to this JSON file.
        plot: Plot the results into this .svg, .png or .pdf file.
    """
    from normlab.bench import run

    run.kernels(only=only, shapes=shapes, cpu=cpu, out=out, plot=plot)


def bench_step(
    schemes: tuple[str, ...] = (),
    preset: str = "125m",
    batch: int = 32,
    length: int = 1024,
    stream: Literal["fp32", "bf16"] = "bf16",
    repeats: int = 5,
    peers: bool = False,
    graphs: bool = True,
    compile_limit: float = 300.0,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Benchmark whole training steps of every scheme relative to Pre-Norm, compiled, in bf16.

    Each row has its share of the speed of matrix products, as measured here and as the GPU's data sheet states (MFU).

    For example:
      normlab bench step --schemes pre geonorm --preset 125m --out step.json

    Args:
        schemes: Schemes to measure; none: all.
        preset: Model size.
        batch: Batch size in sequences.
        length: Sequence length in tokens.
        stream: Data type of the residual stream.
        repeats: Interleaved repeats of each scheme.
        peers: Time other trainers at the same size, too: nanoGPT's model, Hugging Face Llama, litgpt where installed;
            e.g. normlab bench step --schemes pre --peers.
        graphs: Record the steps of our models as CUDA graphs, as normlab train does on one GPU.
        compile_limit: Leave out a model that is not compiled after so many seconds.
        out: Write the results to this JSON file.
        plot: Plot the results into this .svg, .png or .pdf file.
    """
    from normlab import list_schemes
    from normlab.bench import run

    options = {"batch": batch, "length": length, "stream": stream, "repeats": repeats, "peers": peers}
    options |= {"graphs": graphs, "compile_limit": compile_limit}
    run.step(schemes or list_schemes(), preset=preset, **options, out=out, plot=plot)  # type: ignore[arg-type]


def bench_grid(
    sizes: tuple[str, ...] = (),
    at_once: tuple[int, ...] = (),
    quick: bool = False,
    cpu: bool = False,
    batch: int | None = None,
    length: int | None = None,
    vocabulary: int | None = None,
    out: Path | None = None,
) -> None:
    """Benchmark many runs of small models on one GPU, alone and several at once, beside a plain torch.compile loop.

    For example:
      normlab bench grid --sizes 4x256 6x384 --at-once 1 2 --out grid.json

    Args:
        sizes: Model sizes, depth x width; none: 4x256 6x384 8x512 10x640, and 1x16 2x32 with --cpu.
        at_once: Numbers of runs that share the GPU; none: 1 2 3 4, and 1 2 with --cpu.
        quick: Two sizes, one and three runs at once, short measurements.
        cpu: Without a GPU, at tiny sizes: shows what is measured, not how fast a GPU is.
        batch: Batch size in sequences; none: 32, and 2 with --cpu.
        length: Sequence length in tokens; none: 512, and 16 with --cpu.
        vocabulary: Vocabulary size; none: 32768, and 64 with --cpu.
        out: Write the results to this JSON file.
    """
    from normlab.bench import run

    run.grid(sizes, at_once=at_once, quick=quick, cpu=cpu, batch=batch, length=length, vocabulary=vocabulary, out=out)
