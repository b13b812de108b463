"""Setting up a run: data, memory check, model, optimiser, monitors, checkpoints and journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from normlab.data import BatchLoader
from normlab.errors import NormLabError
from normlab.kernels.compiler import cache_autograd_functions
from normlab.models.memory_check import check_memory_to_train
from normlab.models.transformer import Transformer
from normlab.train import optimiser as optimisers
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group, Precision, initialise, shard
from normlab.train.hardware import PeakMemory, matmul_ceiling
from normlab.train.model_cache import BuiltModel, compile_options, compiled, kept_models, reinitialise, shape_of
from normlab.train.monitor.guard import Guard
from normlab.train.monitor.interrupt import Interrupt
from normlab.train.monitor.stuck import StuckWatch
from normlab.train.plan import Workload, expectation, training_seconds
from normlab.train.progress import Meter, StepClock
from normlab.train.step_graph import StepGraphs, graphs_are_used
from normlab.train.storage.checkpoint import Checkpoints
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.journal import Journal
from normlab.train.storage.sinks import check_sinks
from normlab.train.tasks import Data

_DEEP = 32
"""Blocks from which `auto` compiles by layers in any case: the time to compile a whole model grows with its depth."""
_LONG = 1200.0
"""Seconds of training from which it pays to compile the whole model: 12 s more for steps that are 1 % faster."""


def open_data(config: TrainConfig, group: Group, data: Data | None, *, progress: bool) -> Data:
    """The data of a run, opened unless it is given. Raises where data, options or memory do not allow the run."""
    check_sinks(config.sinks)
    graphs_are_used(config, group, compiles=_compiles(config, group))  # raises where they were asked for in vain
    opened: Data = data or config.task_object.open(config, progress=progress)
    if config.batch % (config.accumulate * group.world):
        raise NormLabError(
            f"batch {config.batch} cannot be shared by {group.world} processes in {config.accumulate} parts; "
            f"make it a multiple of {group.world * config.accumulate}"
        )
    sized = config.for_data(opened)
    config.task_object.line(sized, opened)  # raises where the data is shorter than one sample
    check_memory_to_train(
        sized.model, group.device, batch=config.batch // (config.accumulate * group.world),
        length=config.sequence, precision=_precision(config, group), world=group.world,
        compiled=_compiles(config, group) and group.device.type == "cuda",
    )  # fmt: skip
    return opened


def _precision(config: TrainConfig, group: Group) -> Precision:
    return config.precision if config.precision != "auto" else ("bf16" if group.device.type == "cuda" else "fp32")


def _compiles(config: TrainConfig, group: Group) -> bool:
    return config.compile in ("yes", "layers") or (config.compile == "auto" and group.device.type == "cuda")


def by_layers(config: TrainConfig, *, uses_graphs: bool, ceiling: float) -> bool:
    """Whether one block is compiled for all, and not the whole model. `ceiling`: peak FLOP/s of the device."""
    if config.compile != "auto":
        return config.compile == "layers"
    # Without CUDA graphs more calls would cost the host time at every step.
    return config.model.depth >= _DEEP or (uses_graphs and training_seconds(config, ceiling) < _LONG)


class Setup:
    """The objects of a run: data, model, optimiser, monitors, checkpoints, journal, progress line."""

    graphs: StepGraphs
    """CUDA graphs of its steps; the trainer sets them."""

    def __init__(self, config: TrainConfig, folder: RunFolder, group: Group, data: Data | None, progress: bool):
        self.group, self.folder, self.progress, self.task = group, folder, progress, config.task_object
        self.data: Any = open_data(config, group, data, progress=progress)
        self.config = config = config.for_data(self.data)
        on_gpu = group.device.type == "cuda"
        self.precision: Precision = _precision(config, group)
        self.compiles = _compiles(config, group)
        self.uses_graphs = graphs_are_used(config, group, compiles=self.compiles)
        self.ceiling = matmul_ceiling(group.device, torch.bfloat16 if self.precision == "bf16" else torch.float32)
        self._kept = kept_models() if self.compiles and group.world == 1 else None
        found = None if self._kept is None else self._kept.take(shape_of(config))
        self.memory = PeakMemory(group.device, besides=0 if self._kept is None else self._kept.bytes)
        self._built = self._build(found)
        self.model, self.loss, self.measure = self._built.model, self._built.loss, self._built.measure
        self.optimiser = optimisers.build(
            self.model, kind=config.optimiser, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas,
            eps=config.eps, transfer=config.transfer,
        )  # fmt: skip
        self.guard = Guard(config.trouble, spike=config.spike)
        self.watch = self._watch()
        self.loader = self._loader()
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep, group)
        self.journal = Journal(folder, config, group)
        self.workload = Workload.of(config, self.data)
        self.step, self.clock, self.meter = 0, StepClock(), self._meter()
        # On one GPU the host checks a step while the next one runs; AdamW's kernel skips a bad step by itself.
        self.lags = on_gpu and group.world == 1 and config.optimiser == "adamw"
        self.interrupt = Interrupt(progress=progress)
        self.returns: Counter[int] = Counter()
        """Number of rollbacks to each step."""

    def _build(self, kept: BuiltModel | None) -> BuiltModel:
        """The model with its compiled functions: a new one, unless one of the same shape was kept."""
        if kept is not None:
            self._transferred(reinitialise(kept.model, self.group.device, self.config.seed))
            return kept
        model = self._transferred(self._new_model())
        if self.compiles:
            cache_autograd_functions()
        functions: list[Callable[..., torch.Tensor]] = [model.loss, self.task.measure(model)]
        if self.compiles and self.group.world == 1:
            if by_layers(self.config, uses_graphs=self.uses_graphs, ceiling=self.ceiling):
                model.compile_parts(**compile_options())
            else:
                functions = [compiled(function) for function in functions]
        return BuiltModel(model, *functions)

    def _new_model(self) -> Transformer:
        model = self.config.design.build(device="meta")
        shard(
            model, self.group, precision=self.precision, checkpointing=self.config.model.checkpointing,
            compile=self.compiles and self.group.world > 1,
        )  # fmt: skip
        return initialise(model, self.group, self.config.seed)

    def _transferred(self, model: Transformer) -> Transformer:
        transfer = self.config.transfer
        return model if transfer is None else transfer.init_(model)

    def _watch(self) -> StuckWatch:
        # Counted by one rank, so that all ranks use the same number.
        entropy = self.group.broadcast(self.task.guess_loss(self.config, self.data) if self.group.is_main else None)
        return StuckWatch(entropy, self.config.warmup_steps, self.task.metric.guess)

    def _loader(self) -> BatchLoader:
        config, group = self.config, self.group
        part = config.batch // (config.accumulate * group.world)
        line = self.task.line(config, self.data)
        return BatchLoader(line, batch=part, rank=group.rank, world=group.world, device=group.device)

    def _meter(self) -> Meter:
        config = self.config
        flops = config.model.flops_per_token(config.sequence)
        tokens = config.batch * config.sequence
        name = f"{config.model.scheme_object.label} lr {config.lr:g} seed {config.seed}"
        return Meter(
            name, config.steps, tokens, flops, peak=self.ceiling * self.group.world, progress=self.progress,
            left=self.workload.left, shows_peak=self.group.device.type == "cuda",
        )  # fmt: skip

    def expectation(self) -> str:
        """Expected memory and time in one line."""
        return expectation(
            self.config,
            self.group,
            self.workload,
            precision=self.precision,
            compiles=self.compiles,
            ceiling=self.ceiling,
        )

    def autocast(self) -> Any:
        """The autocast context of the run's precision; FSDP2 has its own mixed-precision policy."""
        if self.precision == "fp32" or self.group.world > 1:
            return nullcontext()
        return torch.autocast(self.group.device.type, torch.bfloat16)

    def close(self) -> None:
        """Stop threads and flush metrics; if closing one part fails, the others are closed all the same."""
        with ExitStack() as stack:
            for part in (self.journal, self.meter, self.loader):
                stack.callback(part.close)
            # The memory of graphs is freed before the next run.
            stack.callback(self.graphs.forget)
            if self._kept is not None:
                self._kept.give_back(shape_of(self.config), self._built)
