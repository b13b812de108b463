"""Models compiled as a whole or by layers: seconds of a first run, of a run of a known shape, and of a step.

    python benchmarks/compile_modes.py --schemes pre geonorm --sizes 6x384 12x768 --out compile-modes.json

Every model is trained twice by `normlab train`'s own loop on random tokens: a few steps, which compile it and its
evaluation, and then a run of a known shape. Kernels that one mode has compiled may serve the other, so they take turns
in coming first; an empty compiler cache (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR) makes the first figures cold.
Losses and gradient norms of the first steps must agree between the modes; otherwise there is no figure.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from normlab.bench.facts import dated
from normlab.bench.grid import parse_size
from normlab.bench.grid_worker import Shape
from normlab.bench.synthetic import synthetic_corpus
from normlab.train.model_cache import keep_models
from normlab.train.storage.sinks import read_records
from normlab.train.trainer import train
from normlab.utils.files import write_json

_MODES = ("yes", "layers")
_FIRST = 20
"""Steps of the first run: enough for its CUDA graphs and its evaluation."""
_ALIKE = 0.02
"""Largest relative difference of losses and gradient norms over the first steps: bf16 has 0.004 a rounding."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to compile."""

    schemes: tuple[str, ...] = ("pre", "geonorm")
    sizes: tuple[str, ...] = ("6x384",)
    steps: int = 240
    """Steps of the run of a known shape."""
    batch: int = 32
    length: int = 512
    vocabulary: int = 32_768
    device: str = "cuda"
    out: Path = Path("compile-modes.json")


def main(arguments: Arguments) -> None:
    keep_models()
    rows = []
    for number, shape in enumerate(_shapes(arguments)):
        corpus, expected = synthetic_corpus(shape.vocabulary, 32 * shape.tokens), None
        for mode in _MODES[:: 1 if number % 2 else -1]:
            first, records = _run(shape, mode, _FIRST, corpus)
            expected = _check_alike(records, expected)
            known, records = _run(shape, mode, arguments.steps, corpus)
            step = _late_step(records)
            beside = known - arguments.steps * step
            rows.append({"scheme": shape.scheme, "size": str(shape), "compile": mode, "first_seconds": first})
            rows[-1] |= {"step_seconds": step, "beside_seconds": beside}
            print(
                f"{shape.scheme} {shape} {mode}: first run of {_FIRST} steps {first:.1f} s; "
                f"known shape: {1e3 * step:.3f} ms a step and {beside:.2f} s beside the steps",
                flush=True,
            )
            write_json(arguments.out, {**dated(), "rows": rows})


def _shapes(arguments: Arguments) -> list[Shape]:
    options = {name: getattr(arguments, name) for name in ("vocabulary", "length", "batch", "device")}
    sizes = [parse_size(size) for size in arguments.sizes]
    return [Shape(*size, scheme=scheme, **options) for size in sizes for scheme in arguments.schemes]


def _run(shape: Shape, mode: Any, steps: int, corpus: Any) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of a whole run, and the records of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        train(replace(shape.run(steps), compile=mode), Path(folder) / "run", data=corpus, progress=False)
        whole = time.perf_counter() - begin
        records = read_records(Path(folder) / "run" / "metrics.jsonl")
    return whole, [record for record in records if record["kind"] == "step"]


def _check_alike(records: list[dict[str, Any]], expected: np.ndarray | None) -> np.ndarray:
    """Loss and gradient norm of every step; raises where they are not those of the other mode."""
    found = np.array([[record["loss"], record["grad_norm"]] for record in records])
    if expected is not None and not np.allclose(found, expected, rtol=_ALIKE, atol=0.0):
        raise SystemExit(f"the modes train differently: {np.abs(found / expected - 1.0).max():.3g} apart")
    return found


def _late_step(records: list[dict[str, Any]]) -> float:
    """Seconds of a step in the second half of a run."""
    late = records[len(records) // 2 :]
    return (late[-1]["seconds"] - late[0]["seconds"]) / (late[-1]["step"] - late[0]["step"])


if __name__ == "__main__":
    main(tyro.cli(Arguments))
