"""Training-step benchmarks: tokens per second and memory of every scheme relative to Pre-Norm.

Every contender runs in its own process. They compile in parallel, which takes most of the time, and are then timed in
interleaved repeats, so that a drifting clock affects all equally.
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
"""CPU cores used by one compilation."""

_STEPS = 10
"""Steps in one repeat."""

_CONTEXT = 2**29
"""GPU memory in bytes that a process needs before it allocates a tensor."""


Name = tuple[str, str]
"""A scheme and its kernels."""

BASELINE: Name = ("pre", "triton")
"""Timed before and after each of the others."""


@dataclass(frozen=True)
class StepRow:
    """The result of one scheme with one choice of kernels."""

    scheme: str
    kernels: str
    tokens_per_second: list[float]
    beside: list[float]
    """Mean of the baseline's rates just before and after each of these."""
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def ratios(self) -> list[float]:
        """Rates relative to the baseline's, which cancels slow changes of the machine's speed."""
        return [rate / yard for rate, yard in zip(self.tokens_per_second, self.beside, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median}


class Contender:
    """A model in training whose steps can be timed repeatedly."""

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
        # Free memory for the next contender.
        torch.cuda.empty_cache()
        return found


def _serve(parent: Connection, config: DecoderConfig, batch: int, length: int) -> None:
    """Main function of a contender's process: sends the peak memory, then a rate for every request."""
    try:
        contender = Contender(config, batch, length)
        parent.send(contender.peak)
        while parent.recv():
            parent.send(contender.rate())
    except EOFError:
        return  # the parent has ended
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}".splitlines()[0])


class Comparison:
    """All contenders of one model size, each in its own process."""

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
        """Start and compile all contenders, as many at once as cores and memory allow; yields each when ready."""
        for config in self.configs.values():
            options = {"batch": self.batch, "length": self.length, "precision": "bf16", "compiled": True}
            check_memory_to_train(config, torch.device("cuda"), **options)
        # Otherwise the compiler of every contender would start one worker per core.
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
        """Interleave repeats of all contenders; yields the number of the repeat after each round."""
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
        """The results, the baseline first."""
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
        # Pre-Norm's estimate is used for all. Compiled it needs less, which leaves room for schemes that need more.
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
