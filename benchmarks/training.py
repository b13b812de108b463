"""Training speed: share of the matrix-product ceiling, peak memory and the loader's share of a step, size by size.

    python benchmarks/training.py --data "books/*.jsonl.xz" --tokenizer bpe.json.xz --out results/training.json

Every size is trained for some steps by `normlab train` itself, which measures the ceiling, too; the first steps, in
which the model compiles, are left out.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import normlab
from normlab.bench.facts import dated
from normlab.train import TrainConfig, train
from normlab.utils.files import write_json

_BATCHES = {"125m": 32, "350m": 32, "1.3b": 16}
"""Sequences a step."""


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
    rows = []
    for size in arguments.sizes:
        rows.append(_measure(size, arguments))
        if arguments.out is not None:
            # After each: what is stopped early keeps what it has.
            write_json(arguments.out, {**dated(), "rows": rows})


def _measure(size: str, arguments: Arguments) -> dict[str, Any]:
    batch = _BATCHES.get(size, 32)
    tokens = batch * arguments.length
    config = TrainConfig.preset(
        size, scheme=arguments.scheme, stream="bf16", data=arguments.data, tokenizer=arguments.tokenizer,
        length=arguments.length, batch=batch, tokens=arguments.steps * tokens, evals=1, saves=0,
        eval_tokens=tokens,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder) / size)
        steps = normlab.load_run(Path(folder) / size).metrics("step")[arguments.steps // 6 :]
    seconds = steps[-1]["seconds"] - steps[0]["seconds"]
    rates = sorted(step["tokens_per_s"] for step in steps)
    # All steps over all the time: the host looks at a step late, now sooner and now later.
    rate = (len(steps) - 1) * tokens / seconds
    row = {
        "size": size, "device": result.device, "batch": batch, "length": arguments.length,
        "tokens_per_s": rate, "low": rates[len(rates) // 5], "high": rates[-1 - len(rates) // 5],
        "share_of_ceiling": rate * steps[-1]["mfu"] / steps[-1]["tokens_per_s"],
        "peak_gib": None if result.peak_bytes is None else result.peak_bytes / 2**30,
        "loader_share": sum(s["waited"] for s in steps[1:]) / seconds,
    }  # fmt: skip
    print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


if __name__ == "__main__":
    main(tyro.cli(Arguments))
