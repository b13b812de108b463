"""`Target`: the interface of everything that can be checked. It builds models and gives batches and a loss.

Code that measures (bursts, ladders, the scale test) uses this interface and never asks for the kind of target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from normlab.errors import NormLabError, in_one_line, unknown
from normlab.models.estimate import count_parameters
from normlab.probes.start import LENGTH, Fresh
from normlab.schemes.contract.scheme import Scheme
from normlab.targets import scheme_rules
from normlab.targets.tasks import NextToken, TokenTask, Workload, answer
from normlab.utils.seeded import seeded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Target(ABC):
    """A design that can be checked: `build` it at any size it allows, train it on `batches` with `loss`."""

    kind: ClassVar[str]
    name: str
    """Name for titles, as given by the user."""
    depth: int
    """Number of blocks of the design, in its largest stack."""
    width: int | None
    """Hidden width; None if unknown."""
    notes: tuple[str, ...] = ()
    """Notes on what was changed, one line each."""
    scheme: Scheme | None = None
    """Its scheme, if known."""
    blocks: str | None = None
    """Pattern of the block modules, if the probe cannot find them."""
    resizable: frozenset[str] = frozenset()
    """The sizes that `build` can change: "depth", "width"."""
    task: Workload

    def __init__(self, *, device: str = "cpu", dtype: str = "fp32"):
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        self.device, self.dtype = _device(device), dtype

    @property
    def unigram(self) -> float | None:
        """Unigram entropy of the data in nats: a model that learns anything of their order gets below it."""
        return self.task.unigram

    def build(self, *, depth: int | None = None, width: int | None = None, seed: int = 0) -> nn.Module:
        """A new model with random weights from `seed`; the caller's random state is not changed."""
        blocks, wide = self._allowed("depth", depth, self.depth), self._allowed("width", width, self.width)
        with seeded(seed):
            # Made on the CPU, so that a seed means the same weights on every device.
            return self._make(blocks, wide, seed).to(self.device)

    def batches(self, seed: int = 0) -> Iterator[Any]:
        """Endless batches, the same for every depth, width and learning rate."""
        return (moved(batch, self.device) for batch in self.task.batches(seed))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The training loss, in nats per token if tokens are predicted; matrix products use the target's dtype."""
        with self._autocast():
            return self.task.loss(model, batch)

    def with_step(self, size: float) -> Target | None:
        """The same design with residual step Δt; None if it has none."""
        return None

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Logits of the model's own head; None if it has none or cannot be found."""
        with self._autocast():
            return self.task.logits(model, batch)

    @property
    def is_decoder(self) -> bool | None:
        """Whether the model is causal; None if only its attention masks can tell."""
        if isinstance(self.task, TokenTask) and not self.task.causal:
            return False
        return True if type(self.task) is NextToken else None

    def fresh(self, size: str, depth: int | None = None) -> list[Fresh]:
        """Models whose initial loss is measured, at the width that will be trained; only with tokens and a vocabulary.

        `size` names the preset for a design that has no size of its own, `depth` the blocks of one that can be built
        with any number. Empty where there is no such head.
        """
        if not self.task.has_head:
            return []
        blocks = depth or self.depth
        model = self.build(depth=blocks)
        name = f"{blocks} blocks" + (f", width {self.width}" if self.width else "")
        length = getattr(self.task, "length", LENGTH)
        return [
            Fresh(name, lambda: model, said, count_parameters(model), is_fresh=self.kind != "module", length=length)
        ]

    def twin(self) -> Target | None:
        """A Pre-Norm decoder of the same size on the same data, for comparison; None for other tasks."""
        from normlab.targets.scheme import twin_of

        return twin_of(self)

    def after_step(self, model: nn.Module) -> None:
        """Apply the constraint of the model's scheme, if any, after an optimiser step."""
        scheme_rules.after_step(model)

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, by the scheme's rules if it has one; without frozen parameters."""
        return scheme_rules.param_groups(model, lr, weight_decay)

    def check_room(self, *, depth: int | None = None, width: int | None = None) -> None:  # noqa: B027
        """Raise if a model of this size needs more memory than there is, as far as that can be estimated."""

    def try_out(self, what: str, advice: str, **size: int) -> None:
        """Build and run the design once, so that one that cannot run fails before anything is measured."""
        with in_one_line(what, advice), torch.no_grad(), seeded(0):
            self.loss(self.build(**size), next(self.batches()))

    @abstractmethod
    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        """Build the model; torch's generator has been seeded."""

    def _allowed(self, what: str, asked: int | None, own: Any) -> Any:
        if asked is None or asked == own:
            return own
        if what not in self.resizable:
            raise NormLabError(f"{self.name}: its {what} is {own} and cannot be changed; leave out {what} {asked}")
        if asked < 1:
            raise NormLabError(f"{self.name}: {what} must be at least 1, got {asked}")
        return asked

    def _autocast(self) -> AbstractContextManager:
        if self.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.dtype])


def said(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Call the model with token ids alone and return its output."""
    return answer(model(ids))


def moved(batch: Any, device: torch.device) -> Any:
    """Move a batch (tensor, tuple, list or dict) to a device."""
    # Tensors, and batches of other libraries that must stay what they are.
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _device(name: str) -> torch.device:
    try:
        one = torch.zeros(1, device=name)
        one.item()  # the meta device has shapes, but no numbers
        return one.device
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NormLabError(f"device {name!r} cannot be used ({reason}); try cpu") from None
