"""CUDA graphs of a training step: all its kernels are launched at once, by two calls.

A step of a small model is several hundred short kernels, and the host takes longer to launch them than the GPU to
execute them. A CUDA graph records the launches once and replays them from then on. A step has two graphs, since the
host judges the step before between them, while the GPU is busy with the first:

    gradient    forward and backward pass, clipping; writes loss and gradient norm
    update      the guard's decision, the optimiser's step, the scheme's constraint

A graph reads and writes the same memory at every replay. So a batch is copied into tensors that stay, the learning
rate and the guard's threshold are tensors on the device, and parameters and optimiser state are changed in place.
Loading a checkpoint replaces the optimiser's state: call `forget`, and the graphs are recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import Optimizer

from normlab.data import Batch
from normlab.errors import NormLabError
from normlab.train import optimiser as optimisers

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig
    from normlab.train.distributed import Group
    from normlab.train.setup import Setup

WARM_UP = 3
"""Ordinary steps before the recording: they compile the model, load its kernels and create the optimiser's state."""


class Graph(Protocol):
    """Protocol of a recorded graph, which `replay` runs."""

    def replay(self) -> None: ...


Gradient = Callable[[Sequence[Batch]], tuple[torch.Tensor, torch.Tensor]]
"""Computes loss and gradient norm of the parts of a batch, and leaves the gradient in the model."""

Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Applies the gradient, given loss, gradient norm and the guard's threshold."""

Record = Callable[[Callable[[], None], Any], Graph]
"""Records the work of a function; the second argument is the memory pool that the graphs of a step share."""


def record_cuda(work: Callable[[], None], pool: Any, stream: torch.cuda.Stream | None = None) -> Graph:
    """A CUDA graph of the kernels that `work` launches. They are recorded and not executed.

    Graphs that are recorded on the same `stream` (None: one that all share) must not be replayed at the same time.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # The outer context: torch.cuda.graph does not leave its stream where the recording fails. The mode: the default one
    # would also forbid what other threads do meanwhile, and the loader's allocates pinned memory.
    how: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with torch.cuda.stream(current), torch.cuda.graph(graph, **how):
        work()
    return graph


def graphs_are_used(config: TrainConfig, group: Group, *, compiles: bool) -> bool:
    """Whether steps are replayed as CUDA graphs. Raises if they were asked for and are not possible."""
    if config.cuda_graphs == "off":
        return False
    obstacle = _obstacle(config, group)
    if config.cuda_graphs == "auto":
        return obstacle is None and compiles
    if obstacle is not None:
        raise NormLabError(f"cuda_graphs is on, but {obstacle}; try cuda_graphs auto")
    return True


def _obstacle(config: TrainConfig, group: Group) -> str | None:
    if group.device.type != "cuda":
        return "there is no GPU"
    if group.world > 1:
        return f"there are {group.world} processes, and a graph records one"
    if config.optimiser == "muon":
        return "Muon is not recorded: the host decides on each of its updates"
    if config.model.experts and (config.precision == "fp32" or not _groups_products(group.device)):
        return "experts read their loads on the host"
    return None


def _groups_products(device: torch.device) -> bool:
    """Whether one kernel multiplies with all experts in bf16, which needs no loads on the host."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def _check_room(device: torch.device) -> None:
    """Raise where an evaluation or a diagnosis might not fit beside the memory of a step, which a graph never frees."""
    if device.type == "cuda" and 2 * torch.cuda.max_memory_allocated(device) > torch.cuda.mem_get_info(device)[1]:
        raise RuntimeError("a step takes more than half of the GPU's memory, and a graph would keep it")


class StepGraphs:
    """The training steps of a run as graphs, recorded after some ordinary steps."""

    def __init__(self, run: Setup, gradient: Gradient, update: Update, *, record: Record | None):
        """`record` makes a graph; None: there are none, and all steps are ordinary."""
        self.record = record
        self._run, self._gradient, self._update = run, gradient, update
        self._ordinary = 0
        self._recorded: _Recorded | None = None

    def ready(self, parts: Sequence[Batch]) -> _Recorded | None:
        """The graphs of a step on such parts; None where the step is to be an ordinary one."""
        if self._recorded is None and self.record is not None:
            if self._ordinary >= WARM_UP:
                self._recorded = self._try(self.record, parts)
            self._ordinary += 1
        return self._recorded

    @property
    def recorded(self) -> _Recorded | None:
        """The graphs, if they have been recorded."""
        return self._recorded

    def forget(self) -> None:
        """Release the graphs, because tensors that they use were replaced; they are recorded anew."""
        self._recorded, self._ordinary = None, 0

    def _try(self, record: Record, parts: Sequence[Batch]) -> _Recorded | None:
        run = self._run
        run.optimiser.zero_grad(set_to_none=True)
        try:
            _check_room(run.group.device)
            return _Recorded(self._gradient, self._update, run.optimiser, record, parts)
        except (RuntimeError, NotImplementedError) as error:
            self.record = None
            # What was recorded in part has not been executed: only gradients may hold memory of the graph.
            run.optimiser.zero_grad(set_to_none=True)
            optimisers.set_capturable(run.optimiser, False)
            reason = " ".join(str(error).split()) or type(error).__name__
            run.journal.event(run.step, "graphs", f"steps are not recorded as CUDA graphs: {reason}")
            run.meter.say(f"steps are not recorded as CUDA graphs, which makes small models slower: {reason[:200]}")
            return None


class _Recorded:
    """The two graphs of a step, with the tensors that they read and write."""

    def __init__(
        self, gradient: Gradient, update: Update, optimiser: Optimizer, record: Record, parts: Sequence[Batch]
    ):
        device = parts[0].inputs.device
        self._make_gradient, self._make_update = gradient, update
        self._parts = [Batch(*(None if t is None else t.clone() for t in part)) for part in parts]  # type: ignore[arg-type]
        self._threshold = torch.zeros((), dtype=torch.float64, device=device)
        self._loss = self._norm = torch.zeros((), device=device)
        optimisers.set_capturable(optimiser, True)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._gradient_graph = record(self._compute_gradient, pool)
        self._update_graph = record(self._apply_update, pool)

    def gradient(self, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient norm of a batch. Both are overwritten by the next call."""
        for mine, part in zip(self._parts, parts, strict=True):
            for kept, new in zip(mine, part, strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new, non_blocking=True)
        self._gradient_graph.replay()
        return self._loss, self._norm

    def update(self, threshold: float) -> None:
        """The optimiser's step with that gradient, unless the loss is above the threshold or not finite."""
        self._threshold.fill_(threshold)
        self._update_graph.replay()

    def replay(self) -> None:
        """Make a step on the last batch once more, to see how long it takes."""
        self._gradient_graph.replay()
        self._update_graph.replay()

    def _compute_gradient(self) -> None:
        self._loss, self._norm = self._make_gradient(self._parts)

    def _apply_update(self) -> None:
        self._make_update(self._loss, self._norm, self._threshold)
