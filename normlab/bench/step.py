"""Training-step benchmarks: tokens per second and memory of every contender relative to Pre-Norm.

Every contender runs in its own process. They compile in parallel, which takes most of the time, and are then timed in
interleaved repeats, so that a drifting clock affects all equally.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from normlab.bench.contender import ContenderFacts, Entrant, Name, SchemeEntrant, serve
from normlab.errors import NormLabError
from normlab.models import DecoderConfig
from normlab.models.estimate import MemoryEstimate

_CORES = 2
"""CPU cores used by one compilation."""

_CONTEXT = 2**29
"""GPU memory in bytes that a process needs before it allocates a tensor."""

BASELINE: Name = ("pre", "triton")
"""Timed before and after each of the others."""


@dataclass(frozen=True)
class StepRow:
    """The result of one contender."""

    scheme: str
    kernels: str
    tokens_per_second: list[float]
    beside: list[float]
    """Mean of the baseline's rates just before and after each of these."""
    graphs: bool
    """Whether the step was recorded as a CUDA graph."""
    parameters: int
    flops_per_token: int
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def ratios(self) -> list[float]:
        """Rates relative to the baseline's, which cancels slow changes of the machine's speed."""
        return [rate / yard for rate, yard in zip(self.tokens_per_second, self.beside, strict=True)]

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the model's arithmetic at the median rate."""
        return self.median * self.flops_per_token

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median}


def scheme_entrants(
    names: Iterable[Name], *, preset: str, length: int, stream: str, graphs: bool = True
) -> list[SchemeEntrant]:
    """NormLab's models of one size by scheme and kernels."""
    shared: dict[str, Any] = {"stream": stream, "max_length": length}
    configs = (DecoderConfig.preset(preset, scheme=scheme, kernels=kernels, **shared) for scheme, kernels in names)
    return [SchemeEntrant(config, graphs) for config in configs]


class Comparison:
    """All contenders of one model size, each in its own process."""

    def __init__(self, entrants: Iterable[Entrant], *, batch: int, compile_limit: float = 300.0):
        self.entrants = {entrant.name: entrant for entrant in entrants}
        self.batch = batch
        self.compile_limit = compile_limit
        """Seconds after which a contender that is not compiled is left out."""
        self.failed: dict[Name, str] = {}
        """Contenders that are left out, and why."""
        self.lines: dict[Name, Connection] = {}
        self.processes: dict[Name, BaseProcess] = {}
        self.begun: dict[Name, float] = {}
        self.compile_seconds: dict[Name, float] = {}
        self.facts: dict[Name, ContenderFacts] = {}
        self.rates: dict[Name, list[float]] = {name: [] for name in self.entrants}
        self.beside: dict[Name, list[float]] = {name: [] for name in self.entrants}

    def build(self) -> Iterator[Name]:
        """Start and compile all contenders, as many at once as cores and memory allow; yields each when ready."""
        for name, entrant in self.entrants.items():
            try:
                entrant.check(self.batch)
            except NormLabError as error:
                self._leave_out(name, str(error))
                yield name
        # Otherwise the compiler of every contender would start one worker per core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES))
        todo, busy, room = [BASELINE, *self.others], {}, self._room()
        while todo or busy:
            while todo and self._fits(todo[0], busy.values(), room):
                name = todo.pop(0)
                self.begun[name] = time.monotonic()
                busy[self._start(name)] = name
            ready: list[Any] = wait(list(busy), self._patience(busy.values()))
            for line in ready:
                name = busy.pop(line)
                self.compile_seconds[name] = time.monotonic() - self.begun[name]
                if (facts := self._answer(name)) is not None:
                    self.facts[name] = facts
                yield name
            for line in [line for line, name in busy.items() if self._patience([name]) <= 0.0]:
                yield self._give_up(busy.pop(line))

    def time(self, repeats: int) -> Iterator[int]:
        """Interleave repeats of all contenders; yields the number of the repeat after each round."""
        for repeat in range(1, repeats + 1):
            before = self._rate(BASELINE)
            for name in self.others:
                rate, after = self._rate(name), self._rate(BASELINE)
                if rate is not None:
                    self.rates[name].append(rate)
                    self.beside[name].append((before + after) / 2)
                self.rates[BASELINE].append(after)
                before = after
            yield repeat

    def rows(self) -> list[StepRow]:
        """The results, the baseline first."""
        self.beside[BASELINE] = self.rates[BASELINE]
        return [
            StepRow(*name, self.rates[name], self.beside[name], self.entrants[name].graphs, **asdict(self.facts[name]))
            for name in (BASELINE, *self.others)
        ]

    @property
    def others(self) -> list[Name]:
        """Contenders beside the baseline that have not failed."""
        return [name for name in self.entrants if name != BASELINE and name not in self.failed]

    def _rate(self, name: Name) -> Any:
        self.lines[name].send(True)
        return self._answer(name)

    def _room(self) -> float:
        """Bytes of GPU memory for the steps of contenders, beside the weights and optimisers of all."""
        one, names = self._estimate, [BASELINE, *self.others]
        waiting = len(names) * (one.weights + one.optimiser + _CONTEXT)
        return 0.95 * torch.cuda.mem_get_info()[1] - waiting

    def _fits(self, name: Name, busy: Collection[Name], room: float) -> bool:
        """Whether a contender can be compiled beside those that are; one alone always can."""
        needs = (self._step_bytes(other) for other in (name, *busy))
        return not busy or (len(busy) < (os.cpu_count() or 1) // _CORES and sum(needs) <= room)

    def _step_bytes(self, name: Name) -> int:
        # Pre-Norm's estimate is used for all. Compiled it needs less, which leaves room for schemes that need more.
        one = self._estimate
        return one.total - one.weights - one.optimiser + self.entrants[name].extra_bytes(self.batch)

    @cached_property
    def _estimate(self) -> MemoryEstimate:
        config = self.entrants[BASELINE].config
        return config.memory(self.batch, config.max_length)

    def _start(self, name: Name) -> Connection:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.processes[name] = spawn.Process(target=serve, args=(theirs, self.entrants[name], self.batch), daemon=True)
        self.processes[name].start()
        theirs.close()
        self.lines[name] = ours
        return ours

    def _patience(self, names: Iterable[Name]) -> float:
        """Seconds until the first of these has compiled for as long as it may."""
        return max(0.0, min(map(self.begun.__getitem__, names)) + self.compile_limit - time.monotonic())

    def _give_up(self, name: Name) -> Name:
        """End the process of a contender that compiles for too long."""
        self.processes[name].kill()
        self._leave_out(name, f"not compiled within {self.compile_limit:g} s; try --compile-limit")
        return name

    def _answer(self, name: Name) -> Any:
        """What a contender's process sends next; None if it failed, and is left out from now on."""
        try:
            answer = self.lines[name].recv()
        except EOFError:
            answer = "its process died"
        if not isinstance(answer, str):
            return answer
        self._leave_out(name, answer)
        return None

    def _leave_out(self, name: Name, reason: str) -> None:
        """Go on without a contender; raises if nothing is left to compare."""
        self.failed[name] = reason
        if name == BASELINE or not self.others:
            raise NormLabError(f"{title(name)} failed: {reason}")


def title(name: Name) -> str:
    """A contender in words."""
    return f"{name[0]} ({name[1]})"
