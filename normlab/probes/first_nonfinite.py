"""Find the first module whose output, or whose output's gradient, is NaN or infinite.

One mechanism, `OutputWatch`: forward hooks record the smallest and the largest entry of what modules return, on the
device. That is one read of each activation; nothing waits for the device. Children finish before their parents, so the
first record that is not finite names the module that made the value. It has three users:

    Probe                  all modules of one probed step
    NonfiniteAlarm         the blocks of every other step of a live loop, read when the records have reached the host
    first_nonfinite()      all modules and gradients of a batch that is run once more, to explain a failed step
"""

# torch annotates hooks, modules and some tensor functions only in part.
# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.models.transformer import Transformer
from normlab.probes.attention import in_backward
from normlab.probes.blocks import eager, find_stacks, walk
from normlab.probes.ledger import Ledger
from normlab.probes.measures import extremes
from normlab.probes.outputs import loss_and_logits, tensors
from normlab.probes.sharded import local, whole
from normlab.probes.untouched import eager_mode, untouched

_LOSS = "the loss"


class OutputWatch:
    """Hooks that record the extremes of every module's output, in the order of execution.

    `modules` gives each module its name. `gradients` records the gradients of the outputs, too, in the order of the
    backward pass. Outputs with fewer than `min_ndim` dimensions are skipped: scalars are losses. So are outputs of
    modules that run inside a backward pass (activation checkpointing) or inside compiled code.
    """

    def __init__(self, modules: Mapping[nn.Module, str], ledger: Ledger, *, gradients: bool = False, min_ndim: int = 2):
        self.ledger = ledger
        self._modules, self._min_ndim = modules, min_ndim
        self._calls: Counter[str] = Counter()
        self._outputs: list[_Record] = []
        self._gradients: list[_Record] | None = [] if gradients else None

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; closing `hooks` removes them."""
        for module, name in self._modules.items():
            hooks.callback(module.register_forward_hook(self._hook(name)).remove)

    def record(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor that no module returns, such as a loss."""
        self._outputs.append(_Record(name, 1, self._write(tensor)))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._outputs

    def first(self, *, with_call: bool = False) -> str | None:
        """The first module whose output is not finite; call it after the ledger is closed.

        `with_call` adds "(call 2)" to the name of a module that had run before.
        """
        found = self._first(self._outputs)
        return found and (found.label if with_call else found.name)

    def first_gradient(self) -> str | None:
        """The first module, from the loss backwards, whose output's gradient is not finite."""
        found = self._first(self._gradients or [])
        return found and found.name

    def _hook(self, name: str):
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or in_backward():
                return
            self._calls[name] += 1
            for tensor in tensors(output, self._min_ndim):
                if tensor.numel():
                    self._outputs.append(_Record(name, self._calls[name], self._write(tensor)))
                    self._await_gradient(name, tensor)

        return keep

    def _await_gradient(self, name: str, tensor: torch.Tensor) -> None:
        records = self._gradients
        if records is not None and tensor.requires_grad:
            tensor.register_hook(lambda gradient: records.append(_Record(name, 1, self._write(gradient))))

    @torch.no_grad()
    def _write(self, tensor: torch.Tensor) -> int:
        return self.ledger.write(extremes(local(tensor.detach())))

    def _first(self, records: list[_Record]) -> _Record | None:
        return next((one for one in records if not all(map(math.isfinite, self.ledger.row(one.place)))), None)


class _Record(NamedTuple):
    name: str
    call: int
    place: int
    """Ledger index of the extremes."""

    @property
    def label(self) -> str:
        return self.name if self.call == 1 else f"{self.name} (call {self.call})"


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """The path of every module inside a model; a shared module has its first path."""
    names: dict[nn.Module, str] = {}
    for path, module in walk(eager(model), ""):
        names.setdefault(module, path)
    return names


class Nonfinite(NamedTuple):
    """Where and when a value was not finite."""

    step: int
    where: str


class NonfiniteAlarm:
    """Watches the blocks and the loss of a training loop for non-finite values, without waiting for the device.

    It costs one read of each hidden state, well below a percent of a step. Records are read when they have reached the
    host. Hooks would split compiled code or compile it anew: of a compiled model only the loss is watched.
    """

    def __init__(self, model: nn.Module, pattern: str | None = None):
        self._model = model
        stacks = find_stacks(model, pattern)
        named = {block: name for stack in stacks for name, block in zip(stack.names, stack.blocks, strict=True)}
        self._named = {} if _is_compiled(model) else named
        self._watch = OutputWatch(self._named, Ledger())
        self._sent: deque[tuple[int, OutputWatch]] = deque()

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks for one step; closing `hooks` removes them."""
        self._watch.listen(hooks)
        hooks.callback(self._model.register_forward_hook(self._on_output).remove)

    def tell(self, loss: torch.Tensor) -> None:
        """Watch a loss that the model's output does not hold."""
        self._watch.record(_LOSS, loss)

    def send(self, step: int) -> None:
        """End the step: start copying its records to the host."""
        if not self._watch.is_empty:
            self._watch.ledger.close()
            self._sent.append((step, self._watch))
        self._watch = OutputWatch(self._named, Ledger())

    @property
    def pending(self) -> int:
        """Number of steps whose records were sent and not read yet."""
        return len(self._sent)

    def poll(self, wait: bool = False, most: int | None = None) -> Nonfinite | None:
        """Read the steps that have arrived; return the first value that is not finite.

        `wait` waits for steps that are still on their way; at most `most` steps are read.
        """
        for _ in range(self.pending if most is None else most):
            if not (wait or self._sent[0][1].ledger.is_there):
                break
            step, watch = self._sent.popleft()
            if (where := watch.first()) is not None:
                return Nonfinite(step, where)
        return None

    def _on_output(self, _model: nn.Module, _args: Any, output: Any) -> None:
        loss, _ = loss_and_logits(output)
        if loss is not None and not torch.compiler.is_compiling():
            self.tell(loss)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(m, "_orig_mod") or m._compiled_call_impl is not None or getattr(m, "is_compiled_by_layers", False)
        for m in model.modules()
    )


@dataclass(frozen=True)
class Diagnosis:
    """Where a batch goes wrong. Names are those of `model.named_modules()` and `model.named_parameters()`."""

    forward: str | None
    """The first module whose output is not finite; "loss" if only the loss is not."""
    backward: str | None
    """The first module, from the loss backwards, whose output's gradient is not finite; else such a parameter."""
    largest: str | None
    """The layer with the largest gradient norm; one that is not finite counts as the largest."""
    norm: float
    """The gradient norm of `largest`."""

    @property
    def layer(self) -> str | None:
        """The module to name."""
        return self.forward or self.backward or self.largest

    def __str__(self) -> str:
        if self.forward:
            return f"{self.forward} returns values that are not finite"
        if self.backward:
            return f"the gradient at {self.backward} is not finite"
        return f"the largest gradient is that of {self.largest}, norm {self.norm:.4g}"


def first_nonfinite(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> Diagnosis:
    """Run the batch once more, forward and backward, with hooks on every module; the model is restored afterwards."""
    ledger = Ledger()
    watch = OutputWatch(module_names(model), ledger, gradients=True, min_ndim=0)
    with untouched(model), eager_mode(), ExitStack() as hooks:
        watch.listen(hooks)
        loss = model.loss(inputs, targets, **options)
        loss.backward()
        norms = _grad_norms(model)
        broken = next((name for name, p in model.named_parameters() if _is_broken(p.grad)), None)
    ledger.close()
    forward = watch.first() or (None if math.isfinite(loss.item()) else "loss")
    # A NaN hides every other norm; max alone would drop it, since it compares as neither larger nor smaller.
    largest = max(norms, key=lambda name: (not math.isfinite(norms[name]), norms[name]), default=None)
    return Diagnosis(forward, watch.first_gradient() or broken, largest, norms[largest] if largest else 0.0)


def _grad_norms(model: nn.Module) -> dict[str, float]:
    """The gradient norm of every layer: of each block, and of each module outside of blocks."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = _layer_of(name)
            norm = float(whole(torch.linalg.vector_norm(parameter.grad.float())))
            squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def _layer_of(name: str) -> str:
    """`stack.layers.3` of `stack.layers.3.branches.0.qkv.weight`; the module itself outside of blocks."""
    parts = name.split(".")[:-1]
    depth = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:depth])


def _is_broken(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not bool(whole(torch.isfinite(tensor).all()))
