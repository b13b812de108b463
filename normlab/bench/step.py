"""Whole training steps: tokens a second and memory of every scheme, beside Pre-Norm's, repeats interleaved.

Every contender lives in a process of its own: they compile side by side, for that is what takes the time, and then have
the GPU in turns, so that a drifting clock hits all alike.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from normlab.bench.timing import measure
from normlab.errors import NormLabError
from normlab.models import Decoder, DecoderConfig
from normlab.models.memory_check import check_memory_to_train

_CORES = 2
"""CPU cores that one compilation keeps busy."""

_STEPS = 10
"""Steps that one turn consists of."""

_CONTEXT = 2**29
"""Bytes that a process takes on the GPU before it has a tensor there."""


Name = tuple[str, str]
"""A scheme and its kind of kernels."""

BASELINE: Name = ("pre", "triton")
"""Has its turn before and after everybody else's."""


@dataclass(frozen=True)
class StepRow:
    """One scheme with one kind of kernels."""

    scheme: str
    kernels: str
    tokens_per_second: list[float]
    beside: list[float]
    """The yardstick's rates just before and after each of these, averaged."""
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def ratios(self) -> list[float]:
        """Rates in units of the yardstick's: what slows the machine for a while slows both."""
        return [rate / yard for rate, yard in zip(self.tokens_per_second, self.beside, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median}


class Contender:
    """A model in training that can be timed again and again."""

    def __init__(self, config: DecoderConfig, batch: int, length: int):
        torch.manual_seed(0)
        self.device, self.tokens = torch.device("cuda"), batch * length
        self.model = Decoder(config, device=self.device)
        self.loss = torch.compile(self.model.loss, fullgraph=True)
        self.optimiser = torch.optim.AdamW(self.model.param_groups(lr=6e-4, weight_decay=0.1), fused=True)
        self.batch = torch.randint(0, config.vocab_size, (batch, length + 1), device=self.device)
        for _ in range(3):
            self.step()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        self.peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.model.after_step()

    def rate(self) -> float:
        found = self.tokens / measure(self.step, self.device, repeats=_STEPS, warmup=2).median
        # What the next one needs.
        torch.cuda.empty_cache()
        return found


def _serve(parent: Connection, config: DecoderConfig, batch: int, length: int) -> None:
    """A contender's process: report the peak, then a rate for every question."""
    try:
        contender = Contender(config, batch, length)
        parent.send(contender.peak)
        while parent.recv():
            parent.send(contender.rate())
    except EOFError:
        return  # nobody is there any more
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}".splitlines()[0])


class Comparison:
    """Every (scheme, kernels) of one size, as processes that wait for their turn."""

    def __init__(self, names: list[Name], *, preset: str, batch: int, length: int, stream: str):
        shared: dict[str, Any] = {"stream": stream, "max_length": length}
        made = [DecoderConfig.preset(preset, scheme=scheme, kernels=kernels, **shared) for scheme, kernels in names]
        self.configs = {(config.scheme_object.label, config.kernels): config for config in made}
        self.batch, self.length = batch, length
        self.lines: dict[Name, Connection] = {}
        self.peaks: dict[Name, int] = {}
        self.rates: dict[Name, list[float]] = {name: [] for name in self.configs}
        self.beside: dict[Name, list[float]] = {name: [] for name in self.configs}

    def build(self) -> Iterator[Name]:
        """Compile all, as many at once as cores and memory allow."""
        for config in self.configs.values():
            options = {"batch": self.batch, "length": self.length, "precision": "bf16", "compiled": True}
            check_memory_to_train(config, torch.device("cuda"), **options)
        # Every contender's compiler would start a worker per core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES))
        todo, busy, most = list(self.configs), {}, self._at_once()
        while todo or busy:
            while todo and len(busy) < most:
                name = todo.pop(0)
                busy[self._start(name)] = name
            for line in wait(list(busy)):
                name = busy.pop(line)  # type: ignore[arg-type]
                self.peaks[name] = self._answer(name)
                yield name

    def time(self, repeats: int) -> Iterator[int]:
        """Turns of all, as often as told; gives the number of the repeat whenever all have had theirs."""
        for repeat in range(1, repeats + 1):
            before = self._rate(BASELINE)
            for name in self.others:
                rate, after = self._rate(name), self._rate(BASELINE)
                self.rates[name].append(rate)
                self.beside[name].append((before + after) / 2)
                self.rates[BASELINE].append(after)
                before = after
            yield repeat

    def rows(self) -> list[StepRow]:
        """The yardstick first, beside itself."""
        self.beside[BASELINE] = self.rates[BASELINE]
        return [
            StepRow(*name, self.rates[name], self.beside[name], self.peaks[name]) for name in (BASELINE, *self.others)
        ]

    @property
    def others(self) -> list[Name]:
        return [name for name in self.configs if name != BASELINE]

    def _rate(self, name: Name) -> float:
        self.lines[name].send(True)
        return self._answer(name)

    def _at_once(self) -> int:
        # Pre-Norm stands for all. Compiled it needs less than the estimate, which leaves room for those that need more.
        one = next(iter(self.configs.values())).memory(self.batch, self.length)
        waiting = len(self.configs) * (one.weights + one.optimiser + _CONTEXT)
        room = 0.95 * torch.cuda.mem_get_info()[1] - waiting
        running = one.total - one.weights - one.optimiser
        return max(1, min(int(room / running), (os.cpu_count() or 1) // _CORES))

    def _start(self, name: Name) -> Connection:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        spawn.Process(target=_serve, args=(theirs, self.configs[name], self.batch, self.length), daemon=True).start()
        theirs.close()
        self.lines[name] = ours
        return ours

    def _answer(self, name: Name) -> Any:
        try:
            answer = self.lines[name].recv()
        except EOFError:
            answer = "its process died"
        if isinstance(answer, str):
            raise NormLabError(f"{name[0]} with {name[1]} kernels failed: {answer}")
        return answer
