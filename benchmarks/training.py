"""Training speed: share of the matrix-product ceiling, peak memory and the loader's share of a step, size by size.

    python benchmarks/training.py --data "books/*.jsonl.xz" --tokenizer bpe.json.xz --out results/training.json

Every size is trained for some steps by `normlab train` itself, which measures the ceiling, too; the first steps, in
which the model compiles, are left out.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import normlab
from normlab.files import write_json
from normlab.train import TrainConfig, train
from normlab.versions import versions

_BATCHES = {"125m": (32, 1), "350m": (32, 2), "1.3b": (16, 2)}
"""Sequences a step and parts that they are cut into."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to train on and how long."""

    data: tuple[str, ...] = ("python",)
    tokenizer: str = "bytes"
    sizes: tuple[str, ...] = ("125m", "350m", "1.3b")
    scheme: str = "pre"
    steps: int = 60
    length: int = 1024
    out: Path | None = None


def main(arguments: Arguments) -> None:
    rows = [_measure(size, arguments) for size in arguments.sizes]
    if arguments.out is not None:
        settings = dataclasses.asdict(arguments) | {"out": str(arguments.out)}
        write_json(
            arguments.out, {"script": "benchmarks/training.py", **settings, "versions": versions(), "rows": rows}
        )


def _measure(size: str, arguments: Arguments) -> dict[str, Any]:
    batch, parts = _BATCHES.get(size, (32, 1))
    tokens = batch * arguments.length
    config = TrainConfig.preset(
        size, scheme=arguments.scheme, stream="bf16", data=arguments.data, tokenizer=arguments.tokenizer,
        length=arguments.length, batch=batch, accumulate=parts, tokens=arguments.steps * tokens, evals=1, saves=0,
        eval_tokens=tokens,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder) / size)
        steps = normlab.load_run(Path(folder) / size).metrics("step")[arguments.steps // 6 :]
    rates = sorted(step["tokens_per_s"] for step in steps)
    row = {
        "size": size, "device": result.device, "batch": batch, "accumulate": parts, "length": arguments.length,
        "tokens_per_s": statistics.median(rates), "low": rates[len(rates) // 5], "high": rates[-1 - len(rates) // 5],
        "share_of_ceiling": statistics.median(step["mfu"] for step in steps),
        "peak_gib": None if result.peak_bytes is None else result.peak_bytes / 2**30,
        "loader_share": sum(s["waited"] for s in steps[1:]) / (steps[-1]["seconds"] - steps[0]["seconds"]),
    }  # fmt: skip
    print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


if __name__ == "__main__":
    main(tyro.cli(Arguments))
