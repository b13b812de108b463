"""The kernels of a training step: how long each takes on the GPU, from replays of the step's CUDA graphs.

    python benchmarks/step_kernels.py --sizes 4x256 8x512 --schemes pre geonorm --out results/step-kernels.json

Steps are those of a ladder: length 512, 32 sequences, vocabulary 32,768, fp32 stream. The table has the kernels that
take most of a step; the file has all of them.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from normlab.bench.facts import dated
from normlab.bench.grid_worker import Shape, _Run
from normlab.bench.synthetic import synthetic_corpus
from normlab.errors import NormLabError
from normlab.ladders.size import Size
from normlab.train.distributed import start
from normlab.train.hardware import matmul_ceiling
from normlab.utils.files import write_json

_REPLAYS = 20

_GROUPS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "gemv", "splitk"),
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa"),
    "optimiser": ("multi_tensor", "adam", "norm_foreach"),
    "cross-entropy": ("_gradient",),
    "embedding": ("embedding", "indexing", "radix", "sort"),
    "copies": ("memcpy", "memset", "fill", "copy"),
}
"""Parts of kernel names, in the order in which they are looked for; what has none of them is element-wise work."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Which steps are looked at."""

    sizes: tuple[str, ...] = ("4x256", "8x512", "12x768")
    """Blocks x width."""
    schemes: tuple[str, ...] = ("pre",)
    most: int = 16
    """Kernels that are printed for each step."""
    out: Path | None = None
    """Where all kernels go, as JSON."""


def group_of(kernel: str) -> str:
    """What kind of work a kernel does, by its name."""
    low = kernel.lower()
    return next((name for name, parts in _GROUPS.items() if any(part in low for part in parts)), "element-wise")


def kernels_of(run: _Run) -> dict[str, tuple[float, float]]:
    """Launches and microseconds a step by kernel, the slowest first."""
    graphs = run.trainer.graphs.recorded
    if graphs is None:
        raise NormLabError("the steps of this run are not recorded as CUDA graphs; a GPU is needed")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(_REPLAYS):
            graphs.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += 1 / _REPLAYS
            found[event.name][1] += event.self_device_time_total / _REPLAYS
    return {name: (n, us) for name, (n, us) in sorted(found.items(), key=lambda pair: -pair[1][1])}


def look(shape: Shape, corpus: Any, group: Any, folder: Path, most: int) -> dict[str, Any]:
    """Time and kernels of the steps of one shape."""
    run = _Run(shape.run(1_000_000), folder, group, corpus)
    seconds, kernels = run.replay_seconds(), kernels_of(run)
    run.close()
    groups: dict[str, float] = defaultdict(float)
    for name, (_, us) in kernels.items():
        groups[group_of(name)] += us
    flops = shape.tokens * shape.model.flops_per_token(shape.length)
    total = sum(groups.values())
    times = f"{1e3 * (seconds or 0.0):.3f} ms a step, kernels {total / 1e3:.3f} ms"
    print(f"\n{shape} {shape.scheme}: {times}, {flops / 1e12:.2f} TFLOP")
    print("  " + ", ".join(f"{name} {us:.0f}" for name, us in sorted(groups.items(), key=lambda p: -p[1])), "µs")
    for name, (launches, us) in list(kernels.items())[:most]:
        print(f"  {us:8.1f} µs {launches:6.1f} x  {name[:110]}")
    return {
        "size": str(shape), "scheme": shape.scheme, "seconds": seconds, "flops": flops, "groups_us": dict(groups),
        "kernels": [{"name": name, "launches": n, "us": us} for name, (n, us) in kernels.items()],
    }  # fmt: skip


def main(arguments: Arguments) -> None:
    group = start("cuda")
    ceiling = matmul_ceiling(group.device, torch.bfloat16)
    print(f"matrix products: {ceiling / 1e12:.0f} TFLOP/s at most")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = synthetic_corpus(32_768, 32 * 16_384)
        for text in arguments.sizes:
            for scheme in arguments.schemes:
                size = Size.parse(text)
                shape = Shape(size.depth, size.width, scheme=scheme)
                rows.append(look(shape, corpus, group, Path(folder) / f"{text}-{scheme}", arguments.most))
                if arguments.out is not None:
                    write_json(arguments.out, {**dated(), "ceiling": ceiling, "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
