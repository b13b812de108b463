"""What `normlab bench grid` times: training steps of NormLab, and the loop that a user would write with torch.compile.

Both are made in processes of their own (`normlab/bench/remote.py`). NormLab's steps are those of `normlab train`:
loader, guard and records are part of them.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from normlab.bench.synthetic import synthetic_corpus
from normlab.models import Decoder, DecoderConfig
from normlab.train.distributed import start
from normlab.train.hardware import matmul_ceiling
from normlab.train.model_cache import keep_models
from normlab.train.step_graph import WARM_UP, record_cuda
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import read_records
from normlab.train.tasks.language import LanguageTrainConfig
from normlab.train.trainer import Trainer, train

_SETTLED = WARM_UP + 3
"""Steps before anything is timed: by then the model is compiled and its graphs are recorded."""
_SHORT = 20
"""Steps of the run whose overhead is measured."""
_ENDLESS = 1_000_000
"""Steps of the runs whose steps are timed: they never end."""
_REPLAYS = 20


@dataclass(frozen=True)
class Shape:
    """A model size with its batch, and where it is trained."""

    depth: int
    width: int
    vocabulary: int = 32_768
    length: int = 512
    batch: int = 32
    scheme: str = "pre"
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def model(self) -> DecoderConfig:
        heads = max(1, self.width // 64)
        return DecoderConfig(
            scheme=self.scheme, depth=self.depth, dim=self.width, heads=heads, vocab_size=self.vocabulary,
            max_length=self.length,
        )  # fmt: skip

    def run(self, steps: int, seed: int = 0) -> LanguageTrainConfig:
        """A run of so many steps."""
        return LanguageTrainConfig(
            model=self.model, length=self.length, batch=self.batch, tokens=steps * self.tokens, evals=1, saves=0,
            eval_tokens=4 * self.tokens, seed=seed, device=self.device,
            # As the short runs of a grid are; one that never ends would be compiled as a whole.
            compile="layers" if self.device == "cuda" else "auto",
        )  # fmt: skip


class GridWorker:
    """A process that trains models of several shapes, as the workers of a comparison do."""

    def __init__(self, shapes: list[Shape]):
        keep_models()
        self._group = start(shapes[0].device)
        self._corpus = synthetic_corpus(shapes[0].vocabulary, 32 * shapes[0].tokens)
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        self._runs: dict[Shape, list[_Run]] = {}

    def ceiling(self) -> float:
        """FLOP/s of a large matrix product, in the precision that runs are trained in."""
        on_gpu = self._group.device.type == "cuda"
        return matmul_ceiling(self._group.device, torch.bfloat16 if on_gpu else torch.float32)

    def prepare(self, shapes: list[Shape], copies: int = 1) -> None:
        """Build, compile and record the runs of these shapes."""
        for shape in shapes:
            runs = self._runs.setdefault(shape, [])
            while len(runs) < copies:
                runs.append(_Run(shape.run(_ENDLESS, seed=len(runs)), self._new_folder(), self._group, self._corpus))

    def time(self, shape: Shape, seconds: float, copies: int = 1) -> float:
        """Steps per second of `copies` runs together, each on a CUDA stream of its own if there are several."""
        return _rate(self._runs[shape][:copies], seconds)

    def time_without_graphs(self, shape: Shape, seconds: float) -> float:
        """Steps per second of one run whose kernels are launched one by one."""
        with self._runs[shape][0].without_graphs():
            return _rate(self._runs[shape][:1], seconds)

    def replay_seconds(self, shape: Shape) -> float | None:
        """Seconds that the GPU needs for the graphs of a step alone; None where there are none."""
        return self._runs[shape][0].replay_seconds()

    def overhead(self, shape: Shape) -> float:
        """Seconds that a whole run of a known shape takes beside its steps: start, first step, evaluation, files."""
        self._close(shape)
        # A shape is known once a whole run has ended: what was timed before has compiled no evaluation.
        self._short_run(shape)
        begin = time.perf_counter()
        folder = self._short_run(shape)
        whole = time.perf_counter() - begin
        steps = [record["seconds"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]
        return whole - (steps[-1] - steps[0])

    def _short_run(self, shape: Shape) -> Path:
        folder = self._new_folder()
        train(shape.run(_SHORT, seed=1000), folder, data=self._corpus, progress=False)
        return folder

    def close(self) -> None:
        """End all runs and remove their files."""
        for shape in list(self._runs):
            self._close(shape)
        self._folder.cleanup()

    def _close(self, shape: Shape) -> None:
        for run in self._runs.pop(shape, []):
            run.close()

    def _new_folder(self) -> Path:
        return Path(self._folder.name) / str(next(self._numbers))


class _Run:
    """One run in progress, whose steps are made on request."""

    def __init__(self, config: LanguageTrainConfig, folder: Path, group: Any, corpus: Any):
        on_gpu = group.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None
        self.device = group.device
        with self.streamed():
            self.trainer = Trainer(config, RunFolder(folder), group, corpus, False)
            if self._stream is not None and self.trainer.graphs.record is not None:
                # Each on a stream of its own: graphs that are recorded on one share its workspace and cannot overlap.
                self.trainer.graphs.record = partial(record_cuda, stream=torch.cuda.Stream())
            self.trainer._clock_on()
            for _ in range(_SETTLED):
                self.step()
            self.settle()

    def streamed(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def step(self) -> None:
        with self.streamed():
            self.trainer._train_step()

    def settle(self) -> None:
        """Wait until all steps are done."""
        with self.streamed():
            self.trainer._judge_pending()
        _wait(self.device)

    def without_graphs(self) -> AbstractContextManager[Any]:
        graphs, stack = self.trainer.graphs, ExitStack()
        record, graphs.record = graphs.record, None
        graphs.forget()
        stack.callback(setattr, graphs, "record", record)
        return stack

    def replay_seconds(self) -> float | None:
        graphs = self.trainer.graphs.recorded
        if graphs is None or self._stream is None:
            return None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.streamed():
            begin.record()
            for _ in range(_REPLAYS):
                graphs.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _REPLAYS

    def close(self) -> None:
        self.trainer.close()


def _rate(runs: list[_Run], seconds: float) -> float:
    """Steps per second of runs that take turns in being given work."""
    for _ in range(_SETTLED):
        for run in runs:
            run.step()
    for run in runs:
        run.settle()

    def turn() -> None:
        for run in runs:
            run.step()

    def settle() -> None:
        for run in runs:
            run.settle()

    return len(runs) * _turns_per_second(turn, settle, seconds)


def _turns_per_second(turn: Callable[[], None], settle: Callable[[], None], seconds: float) -> float:
    turns, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        turn()
        turns += 1
    settle()
    return turns / (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PlainLoop:
    """The loop that a user would write: torch.compile, fused AdamW, clipping, the loss read every ten steps."""

    def __init__(self, shape: Shape):
        self._shape = shape
        self.device = start(shape.device).device
        self._made = 0

    def start(self) -> float:
        """Seconds until the first steps of a new model are done. From the second call on, its kernels are cached."""
        torch._dynamo.reset()
        begin, shape = time.perf_counter(), self._shape
        self._model = Decoder(shape.model, device=self.device)
        self._loss = torch.compile(self._model.loss)
        groups = self._model.param_groups(lr=1e-3, weight_decay=0.1)
        self._optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        # On the device already: in favour of this loop.
        size = (16, shape.batch, shape.length + 1)
        self._batches = torch.randint(0, shape.vocabulary, size, device=self.device)
        for _ in range(_SETTLED):
            self._step()
        _wait(self.device)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Nothing is left behind."""

    def time(self, seconds: float) -> float:
        """Steps per second."""
        return _turns_per_second(self._step, lambda: _wait(self.device), seconds)

    def _step(self) -> None:
        batch = self._batches[self._made % len(self._batches)]
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self._loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._model.after_step()
        self._made += 1
        if self._made % 10 == 0:
            loss.item()
