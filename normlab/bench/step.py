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

_CORES = 2
"""CPU cores that one compilation keeps busy."""

_CONTEXT = 2**29
"""Bytes that a process takes on the GPU before it has a tensor there."""


@dataclass(frozen=True)
class StepRow:
    """One scheme with one kind of kernels."""

    scheme: str
    kernels: str
    tokens_per_second: list[float]
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

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
        found = self.tokens / measure(self.step, self.device, repeats=5, warmup=2).median
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

    def __init__(self, pairs: list[tuple[str, str]], *, preset: str, batch: int, length: int, stream: str):
        shared: dict[str, Any] = {"stream": stream, "max_length": length}
        self.configs = {
            (scheme, kernels): DecoderConfig.preset(preset, scheme=scheme, kernels=kernels, **shared)
            for scheme, kernels in pairs
        }
        self.batch, self.length = batch, length
        self.lines: dict[tuple[str, str], Connection] = {}
        self.peaks: dict[tuple[str, str], int] = {}
        self.rates: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}

    def build(self) -> Iterator[tuple[str, str]]:
        """Compile all, as many at once as cores and memory allow."""
        # Every contender's compiler would start a worker per core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES))
        todo, busy, most = list(self.configs), {}, self._at_once()
        while todo or busy:
            while todo and len(busy) < most:
                pair = todo.pop(0)
                busy[self._start(pair)] = pair
            for line in wait(list(busy)):
                pair = busy.pop(line)  # type: ignore[arg-type]
                self.peaks[pair] = self._answer(pair)
                yield pair

    def time(self, repeats: int) -> Iterator[tuple[str, str]]:
        for _ in range(repeats):
            for pair, line in self.lines.items():
                line.send(True)
                self.rates[pair].append(self._answer(pair))
                yield pair

    def rows(self) -> list[StepRow]:
        return [StepRow(*pair, self.rates[pair], self.peaks[pair]) for pair in self.configs]

    def _at_once(self) -> int:
        # Pre-Norm stands for all. Compiled it needs less than the estimate, which leaves room for those that need more.
        one = next(iter(self.configs.values())).memory(self.batch, self.length)
        waiting = len(self.configs) * (one.weights + one.optimiser + _CONTEXT)
        room = 0.95 * torch.cuda.mem_get_info()[1] - waiting
        one = one.total - one.weights - one.optimiser
        return max(1, min(int(room / one), (os.cpu_count() or 1) // _CORES))

    def _start(self, pair: tuple[str, str]) -> Connection:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        spawn.Process(target=_serve, args=(theirs, self.configs[pair], self.batch, self.length), daemon=True).start()
        theirs.close()
        self.lines[pair] = ours
        return ours

    def _answer(self, pair: tuple[str, str]) -> Any:
        try:
            answer = self.lines[pair].recv()
        except EOFError:
            answer = "its process died"
        if isinstance(answer, str):
            raise NormLabError(f"{pair[0]} with {pair[1]} kernels failed: {answer}")
        return answer
