"""Grid benchmark: how well many runs of small models use a GPU, beside a plain loop with torch.compile.

For every size, alone: the plain loop, NormLab's step with and without CUDA graphs, and the graphs' time on the GPU.
What they differ by says what bounds a step: launches of kernels, other work of the host, or the kernels themselves.
Then several runs at once, in as many processes or in one. Then the time that a run of a known shape takes beside its
steps. From these follow the runs an hour of a grid; the plain loop makes them one after the other, each in a new
process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from normlab.bench.grid_worker import GridWorker, PlainLoop, Shape
from normlab.bench.remote import Local, Remote
from normlab.errors import NormLabError

SIZES = ("4x256", "6x384", "8x512", "10x640")
AT_ONCE = (1, 2, 3, 4)
QUICK_SIZES, QUICK_AT_ONCE = ("4x256", "8x512"), (1, 3)
TINY_SIZES, TINY_AT_ONCE = ("1x16", "2x32"), (1, 2)
"""On a CPU, which takes minutes to compile and time one of the sizes above."""
_USUAL, _TINY = (32_768, 512, 32), (64, 16, 2)
"""Vocabulary, length and batch that are not given, on a GPU and on a CPU."""
RUN_TOKENS = 29_500_000
"""Budget of the runs that are counted an hour: the smallest of a ladder."""

START_GOAL = 5.0
"""Seconds that a run of a known shape may take beside its steps."""
FASTER_GOAL = 3.0
"""Runs an hour at the smallest size, relative to the plain loop."""


def share_goal(width: int) -> float:
    """Share of the matrix-product ceiling that all runs together should reach."""
    return 0.45 if width >= 512 else 0.25


def filled(given: tuple[int | None, int | None, int | None], cpu: bool) -> tuple[int, int, int]:
    """Vocabulary, length and batch, with the usual ones for those that are None."""
    vocabulary, length, batch = (
        usual if one is None else one for one, usual in zip(given, _TINY if cpu else _USUAL, strict=True)
    )
    return vocabulary, length, batch


def parse_size(text: str) -> tuple[int, int]:
    """Depth and width from text like 4x256."""
    match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise NormLabError(f"{text!r} is not a size; expected depth x width, e.g. 4x256")
    return int(match[1]), int(match[2])


@dataclass
class GridRow:
    """What was measured at one size; speeds in steps per second, of all runs together."""

    size: str
    width: int
    tokens_a_step: int
    flops_a_step: float
    ceiling: float
    """FLOP/s of a large matrix product."""
    plain: float = math.nan
    plain_start: float = math.nan
    """Seconds until the first steps of the plain loop are done in a new process, with kernels that are cached."""
    plain_first_start: float = math.nan
    """The same the first time; whether kernels were cached depends on what ran before."""
    without_graphs: float = math.nan
    at_once: dict[int, float] = field(default_factory=dict)
    """By number of processes that share the GPU."""
    in_one_process: dict[int, float] = field(default_factory=dict)
    """By number of runs in one process."""
    replay_seconds: float | None = None
    """GPU time of the graphs of a step."""
    overhead: float = math.nan
    """Seconds that a run of a known shape takes beside its steps."""

    def share(self, rate: float) -> float:
        """Steps per second as a fraction of the ceiling."""
        return rate * self.flops_a_step / self.ceiling

    @property
    def best(self) -> tuple[int, float]:
        """Number of processes with the highest rate, and that rate."""
        return max(self.at_once.items(), key=lambda pair: pair[1])

    def runs_an_hour(self, tokens: int = RUN_TOKENS) -> float:
        """Runs of so many tokens, as many at once as is fastest."""
        count, rate = self.best
        return 3600.0 * count / (self.overhead + math.ceil(tokens / self.tokens_a_step) * count / rate)

    def plain_runs_an_hour(self, tokens: int = RUN_TOKENS) -> float:
        """Runs of the plain loop, one after the other."""
        return 3600.0 / (self.plain_start + math.ceil(tokens / self.tokens_a_step) / self.plain)

    @property
    def bounds(self) -> dict[str, float]:
        """Milliseconds of a step alone: launches, other work of the host, kernels."""
        whole, recorded = 1e3 / self.without_graphs, 1e3 / self.at_once[1]
        kernels = recorded if self.replay_seconds is None else 1e3 * self.replay_seconds
        return {"launches": whole - recorded, "host": recorded - kernels, "kernels": kernels}

    def to_dict(self) -> dict[str, Any]:
        shares = {str(count): self.share(rate) for count, rate in self.at_once.items()}
        goals = {"share": share_goal(self.width), "overhead": START_GOAL, "faster": FASTER_GOAL}
        return asdict(self) | {
            "shares": shares, "plain_share": self.share(self.plain), "bounds_ms": self.bounds, "run_tokens": RUN_TOKENS,
            "runs_an_hour": self.runs_an_hour(), "plain_runs_an_hour": self.plain_runs_an_hour(),
            "faster": self.runs_an_hour() / self.plain_runs_an_hour(), "goals": goals,
        }  # fmt: skip


class GridBench:
    """Measures a grid of sizes; `measure` yields a line of text after each part."""

    def __init__(self, shapes: Sequence[Shape], at_once: Sequence[int], *, seconds: float, processes: bool = True):
        """`seconds`: length of one measurement. Without `processes` everything is in this one, for tests."""
        self._shapes, self._seconds = list(shapes), seconds
        self._at_once = sorted({1, *at_once})
        self._make = Remote if processes else Local
        self.rows: list[GridRow] = []

    def measure(self) -> Iterator[str]:
        """Measure everything; afterwards `rows` is complete."""
        first = self._make(GridWorker, self._shapes)
        # Before anything else uses the GPU.
        ceiling = first.call("ceiling")
        self.rows = [_row(shape, ceiling) for shape in self._shapes]
        yield f"ceiling: {ceiling / 1e12:.4g} TFLOP/s in matrix products"
        self._time_plain()
        yield "plain torch.compile loop timed"
        workers = [first, *(self._make(GridWorker, self._shapes) for _ in range(max(self._at_once) - 1))]
        for i, worker in enumerate(workers):
            # Each starts with another size, so that kernels that one has compiled are found by the others.
            at = i % len(self._shapes)
            worker.ask("prepare", self._shapes[at:] + self._shapes[:at])
        for worker in workers:
            worker.answer()
        yield "runs compiled"
        for row, shape in zip(self.rows, self._shapes, strict=True):
            self._time_shared(row, shape, workers)
            yield f"{row.size} timed, {', '.join(map(str, self._at_once))} at once"
        for worker in workers[1:]:
            worker.end()
        self._time_one_process(self.rows[0], self._shapes[0], first)
        for row, shape in zip(self.rows, self._shapes, strict=True):
            row.overhead = first.call("overhead", shape)
        first.end()

    def _time_plain(self) -> None:
        loops = [self._make(PlainLoop, shape) for shape in self._shapes]
        # All compile at the same time, and then again, with kernels that are cached.
        cold, warm = (_ask_all(loops, "start") for _ in range(2))
        for row, loop, first, again in zip(self.rows, loops, cold, warm, strict=True):
            row.plain_first_start, row.plain_start = loop.start_seconds + first, loop.start_seconds + again
            row.plain = loop.call("time", self._seconds)
        for loop in loops:
            loop.end()

    def _time_shared(self, row: GridRow, shape: Shape, workers: list[Local]) -> None:
        row.without_graphs = workers[0].call("time_without_graphs", shape, self._seconds)
        for count in self._at_once:
            row.at_once[count] = sum(_ask_all(workers[:count], "time", shape, self._seconds))
        row.replay_seconds = workers[0].call("replay_seconds", shape)

    def _time_one_process(self, row: GridRow, shape: Shape, worker: Local) -> None:
        """At the smallest size alone, which gains most."""
        for count in self._at_once[1:]:
            worker.call("prepare", [shape], count)
            row.in_one_process[count] = worker.call("time", shape, self._seconds, count)


def _ask_all(workers: Sequence[Local], method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers at the same time."""
    return [worker.answer() for worker in [worker.ask(method, *arguments) for worker in workers]]


def _row(shape: Shape, ceiling: float) -> GridRow:
    flops = shape.model.flops_per_token(shape.length) * shape.tokens
    return GridRow(str(shape), shape.width, shape.tokens, flops, ceiling)


def grid_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Speeds by size: milliseconds of a step, shares of the ceiling, overhead of a run, runs an hour."""
    counts = list(rows[0]["at_once"])
    names = ("size", "plain, ms", "no graphs", "graphs", "GPU", *(f"{count} at once" for count in counts))
    table = Table(*names, "goal", "beside steps, s", "runs/h", "× plain", pad_edge=False)
    for row in rows:
        alone = (row["plain"], row["without_graphs"], row["at_once"][counts[0]])
        times = [f"{1e3 / rate:.2f}" for rate in alone]
        replay = "–" if row["replay_seconds"] is None else f"{1e3 * row['replay_seconds']:.2f}"
        shares = [f"{100 * row['shares'][str(count)]:.0f} %" for count in counts]
        goal = f"{100 * row['goals']['share']:.0f} %"
        runs = (f"{row['overhead']:.1f}", f"{row['runs_an_hour']:.0f}", f"{row['faster']:.2f}")
        table.add_row(row["size"], *times, replay, *shares, goal, *runs)
    return table


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each goal: reached or not, with the figures."""
    lines = []
    for row in rows:
        best, goal = max(row["shares"].values()), row["goals"]["share"]
        lines.append(f"{_mark(best >= goal)} {row['size']}: {best:.1%} of the ceiling (goal {goal:.0%})")
    slowest = max(rows, key=lambda row: row["overhead"])
    limit = slowest["goals"]["overhead"]
    text = f"a run of a known shape takes at most {slowest['overhead']:.1f} s beside its steps (goal {limit:g} s)"
    lines.append(f"{_mark(slowest['overhead'] < limit)} {text}")
    first, goal = rows[0], rows[0]["goals"]["faster"]
    text = f"{first['size']}: {first['faster']:.2f} × the runs an hour of the plain loop (goal {goal:g})"
    lines.append(f"{_mark(first['faster'] >= goal)} {text}")
    for row in rows:
        parts = ", ".join(f"{name} {value:.2f} ms" for name, value in row["bounds_ms"].items())
        lines.append(f"{row['size']}, a step alone and without graphs: {parts}")
    if first["in_one_process"]:
        of_steps = first["flops_a_step"] / first["ceiling"]
        found = ", ".join(f"{count}: {rate * of_steps:.1%}" for count, rate in first["in_one_process"].items())
        lines.append(f"{first['size']}, that many runs in one process, share of the ceiling: {found}")
    return lines


def _mark(reached: bool) -> str:
    return "reached:    " if reached else "not reached:"
