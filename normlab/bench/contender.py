"""One contender of `normlab bench step`: a model whose training step is timed in its own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor, nn

from normlab.bench.timing import measure
from normlab.errors import NormLabError
from normlab.models import Decoder, DecoderConfig
from normlab.models.estimate import count_parameters
from normlab.models.memory_check import check_memory_to_train
from normlab.train.optimiser import set_capturable
from normlab.train.step_graph import Graph, record_cuda

_STEPS = 10
"""Steps in one repeat."""

Name = tuple[str, str]
"""A scheme and its kernels, or a peer and what compiles it."""


@dataclass(frozen=True)
class Training:
    """A model, its loss and its optimiser: all that the benchmark needs to know."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of inputs and targets, compiled."""
    optimiser: torch.optim.Optimizer
    flops_per_token: int
    after_step: Callable[[], object] = lambda: None

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return count_parameters(self.model)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one batch in bf16 autocast; returns the loss."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = self.loss(inputs, targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.after_step()
        return loss.detach()


class Entrant(Protocol):
    """A description of a contender, which can be sent to its process."""

    @property
    def name(self) -> Name: ...

    @property
    def config(self) -> DecoderConfig:
        """Its size; `max_length` is the length of the sequences."""
        ...

    def check(self, batch: int) -> None:
        """Raise a NormLabError if it cannot take part."""

    @property
    def graphs(self) -> bool:
        """Whether its step is recorded as a CUDA graph and replayed."""
        ...

    def extra_bytes(self, batch: int) -> int:
        """Memory of a step beyond the estimate for `config`."""
        ...

    def build(self, device: torch.device) -> Training:
        """The model on a device, its step compiled when it is first called."""
        ...


@dataclass(frozen=True)
class SchemeEntrant:
    """One of NormLab's models."""

    config: DecoderConfig
    graphs: bool = True
    """As `normlab train` does on one GPU."""

    @property
    def name(self) -> Name:
        return self.config.scheme_object.label, self.config.kernels

    def check(self, batch: int) -> None:
        options = {"batch": batch, "length": self.config.max_length, "precision": "bf16", "compiled": True}
        check_memory_to_train(self.config, torch.device("cuda"), **options)

    def extra_bytes(self, batch: int) -> int:
        return 0

    def build(self, device: torch.device) -> Training:
        model = Decoder(self.config, device=device)
        return Training(
            model=model,
            loss=torch.compile(model.loss, fullgraph=True),
            optimiser=torch.optim.AdamW(model.param_groups(lr=6e-4, weight_decay=0.1), fused=True),
            flops_per_token=self.config.flops_per_token(),
            after_step=model.after_step,
        )


@dataclass(frozen=True)
class ContenderFacts:
    """What does not change from one repeat to the next."""

    parameters: int
    flops_per_token: int
    peak_bytes: int
    """Of a step that is not recorded."""


class Contender:
    """A model in training whose steps can be timed repeatedly."""

    def __init__(self, entrant: Entrant, batch: int):
        torch.manual_seed(0)
        self.device, length = torch.device("cuda"), entrant.config.max_length
        self.tokens = batch * length
        self.training, self.graphs = entrant.build(self.device), entrant.graphs
        self.batch = torch.randint(0, entrant.config.vocab_size, (batch, length + 1), device=self.device)
        for _ in range(3):
            self.step()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        peak = torch.cuda.max_memory_allocated(self.device)
        self.facts = ContenderFacts(self.training.parameters, self.training.flops_per_token, peak)
        torch.cuda.empty_cache()

    def step(self) -> None:
        self.training.step(self.batch[:, :-1], self.batch[:, 1:])

    def rate(self) -> float:
        """Tokens per second in one repeat."""
        step = self._recorded().replay if self.graphs else self.step
        found = self.tokens / measure(step, self.device, repeats=_STEPS, warmup=2).median
        # Free memory for the next contender, that of the graph as well: it is recorded anew for every repeat.
        del step
        torch.cuda.empty_cache()
        return found

    def _recorded(self) -> Graph:
        set_capturable(self.training.optimiser, True)
        try:
            return record_cuda(self.step, None)
        except (RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise NormLabError(
                f"its step cannot be recorded as a CUDA graph: {reason[:200]}; try --no-graphs"
            ) from error


def serve(parent: Connection, entrant: Entrant, batch: int) -> None:
    """Main function of a contender's process: sends its facts, then a rate for every request; text if it fails."""
    try:
        contender = Contender(entrant, batch)
        parent.send(contender.facts)
        while parent.recv():
            parent.send(contender.rate())
    except EOFError:
        return  # the parent has ended
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}".splitlines()[0])
