"""What a watch costs: stretches of plain steps, of steps with its alarm alone, and of steps of which one is looked at.

    python benchmarks/probe.py                                     # a model for two cores
    python benchmarks/probe.py --size 125m --batch 32 --length 1024 --compile --out results/probe.json

A stretch is as long as from one look to the next, and runs as a loop does: nothing waits for the device inside. The
three kinds take turns, and each turn is compared with its own plain stretch. On a CPU the time is that of the process,
which others on the machine do not add to. `operations` counts what torch is asked to do in a step outside of compiled
code: on a GPU, where a look's tensors are small, that is what it costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from normlab import Decoder, DecoderConfig
from normlab.bench.facts import dated
from normlab.checks.callbacks import Watch
from normlab.models.config import PRESETS
from normlab.utils.files import write_json

SIZES = {"small": {"depth": 8, "dim": 256, "heads": 4, "vocab_size": 2048}, **PRESETS}
LIMIT = 0.03


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The model, its batch, and how often it is looked at."""

    size: str = "small"
    scheme: str = "pre"
    batch: int = 4
    length: int = 256
    every: int = 50
    repeats: int = 5
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool = False
    out: Path | None = None


class Loop:
    """A training step on one batch."""

    def __init__(self, arguments: Arguments):
        torch.manual_seed(0)
        sizes = SIZES[arguments.size] | {"max_length": arguments.length, "scheme": arguments.scheme}
        self.device = torch.device(arguments.device)
        with self.device:
            self.model = Decoder(DecoderConfig(**sizes))
        self.step_model = torch.compile(self.model) if arguments.compile else self.model
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(0, sizes["vocab_size"], (arguments.batch, arguments.length + 1), device=self.device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].flatten()
        self.watch = Watch(self.step_model, every=arguments.every)

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.step_model(self.inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def watched(self, number: int) -> None:
        with self.watch.step(number):
            self.step()

    def seconds(self, steps: Iterable[Callable[[], None]]) -> float:
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        self._wait()
        began = clock()
        for step in steps:
            step()
        self._wait()
        return clock() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Counting(TorchDispatchMode):
    """Counts operations that do something: views cost nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def main(arguments: Arguments) -> None:
    loop = Loop(arguments)
    plain, listened, looked_at = loop.step, lambda: loop.watched(1), lambda: loop.watched(0)
    for step in (plain, listened, looked_at) * 2:
        step()
    kinds = {
        "plain": [plain] * arguments.every,
        "alarm alone": [listened] * arguments.every,
        "watched": [looked_at, *[listened] * (arguments.every - 1)],
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(arguments.repeats):
        for name, steps in kinds.items():
            times[name].append(loop.seconds(steps) / arguments.every)
    row = _row(times)
    counted = {"plain": plain, "alarm alone": listened, "watched": looked_at}
    row["operations"] = {name: _operations(step) for name, step in counted.items()} if not arguments.compile else None
    _show(row)
    if arguments.out is not None:
        write_json(arguments.out, {**dated(), **row})


def _row(times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {name: _median_ratio(values, times["plain"]) for name, values in times.items()}
    share, alarm = ratios["watched"] - 1, ratios["alarm alone"] - 1
    return {
        "seconds_a_step": {name: statistics.median(values) for name, values in times.items()},
        "ratios": ratios,
        "share": share,
        "of_alarm": alarm,
        "of_looks": share - alarm,
    }


def _median_ratio(values: list[float], plain: list[float]) -> float:
    return statistics.median(value / beside for value, beside in zip(values, plain, strict=True))


def _operations(step: Any) -> int:
    with Counting() as counting:
        step()
    return counting.count


def _show(row: dict[str, Any]) -> None:
    for name, ratio in row["ratios"].items():
        operations = "" if row["operations"] is None else f"  {row['operations'][name]:6d} operations"
        print(f"{name:12s} {1e3 * row['seconds_a_step'][name]:9.2f} ms a step  {ratio:6.4f} x{operations}")
    parts = f"looks {row['of_looks']:+.2%}, alarm {row['of_alarm']:+.2%}"
    print(f"added to a step: {row['share']:+.2%} ({parts}; limit {LIMIT:.0%})")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
