"""`Workload`: endless batches and a loss; next-token, logits and headless tasks."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normlab.data import masking
from normlab.errors import NormLabError
from normlab.probes.outputs import loss_and_logits, own_loss
from normlab.targets.data import TokenData


class Workload(ABC):
    """Endless batches and a loss."""

    unigram: float | None = None
    """Unigram entropy in nats, if tokens are predicted."""
    has_head: bool = True
    """Whether the model has an output head; if False, a fixed random head reads its states."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Any]:
        """The batches of a seed, on the CPU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a model on a batch."""

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Logits of the model's own head for a batch; None if it has none or cannot be found."""
        return None


class FixedBatch(Workload):
    """The user's batch, repeated, with their loss or the model's own."""

    def __init__(self, batch: Any, loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None):
        self.batch, self._loss_fn = batch, loss_fn or own_loss

    def batches(self, seed: int) -> Iterator[Any]:
        return itertools.repeat(self.batch)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._loss_fn(model, batch)

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        heard: list[torch.Tensor | None] = []
        hook = model.register_forward_hook(lambda _m, _a, output: heard.append(loss_and_logits(output)[1]))
        try:
            self.loss(model, batch)
        finally:
            hook.remove()
        return next((logits for logits in reversed(heard) if logits is not None), None)


class TokenTask(Workload):
    """A task made of token sequences."""

    causal = True
    """Whether the next token is predicted."""

    def __init__(self, data: TokenData, *, batch_size: int, length: int):
        self.data, self.batch_size, self.length = data, batch_size, length
        self.unigram = data.unigram

    def sequences(self, seed: int, length: int) -> Iterator[torch.Tensor]:
        """Token ids (B, `length`)."""
        return self.data.sequences(self.batch_size, length, seed)


class NextToken(TokenTask):
    """Next-token prediction for a model with a `loss(tokens, targets)`, such as NormLab's decoder."""

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tokens in self.sequences(seed, self.length + 1):
            yield tokens[:, :-1], tokens[:, 1:]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model.loss(*batch)  # type: ignore[operator]

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return answer(model(batch[0]))


class Logits(NextToken):
    """Next-token prediction for a model that maps token ids (B, T) to logits (B, T, V)."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return cross_entropy(answer(model(inputs)), targets)


class States(Logits):
    """Next-token prediction for a model that returns states (B, T, D): a fixed random head reads them.

    A model that takes states (B, T, D) and not ids gets a fixed random embedding of the tokens.
    """

    has_head = False

    def __init__(self, data: TokenData, *, embedding: int | None = None, **options: Any):
        super().__init__(data, **options)
        self._embedding = None if embedding is None else fixed(data.vocabulary, embedding)

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, targets in super().batches(seed):
            yield (inputs if self._embedding is None else self._embedding[inputs]), targets

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        states = answer(model(inputs))
        return cross_entropy(read_out(states, self.data.vocabulary), targets)

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        return None


def hide(
    tokens: torch.Tensor, ids: torch.Tensor, spare: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked batch, labels); the mask is `spare`, a token that does not occur in the data. `ids` may replace a token.

    BERT's rule and not masks alone: with these nothing asks a model to keep what it was given, and for hundreds of
    steps even a sound one learns no more than how often each token occurs.
    """
    chosen = torch.rand(tokens.shape, generator=generator) < masking.SHARE
    # A batch without a label has no loss.
    chosen[:, 0] = True
    others = ids[torch.randint(len(ids), tokens.shape, generator=generator)]
    draws = torch.rand(tokens.shape, generator=generator)
    inputs, labels = masking.mask_tokens(tokens.numpy(), chosen.numpy(), draws.numpy(), others.numpy(), spare)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def noisy_copies(pictures: torch.Tensor, count: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (noisy images of RMS one, labels): the index of the picture that each is a copy of."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(len(pictures), (count,), generator=generator)
        noise = torch.randn(pictures[labels].shape, generator=generator)
        yield (pictures[labels] + noise) / math.sqrt(2.0), labels


def answer(output: Any) -> torch.Tensor:
    """The output of a model: its logits if it names them, else its last hidden states, else its first tensor."""
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else [output]
    tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if tensor is None:
        raise NormLabError(f"the model returned a {type(output).__name__} without a tensor; pass batch and loss_fn")
    return tensor


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per target, computed in fp32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def read_out(states: torch.Tensor, classes: int) -> torch.Tensor:
    """Logits of RMS one for states of RMS one, by a fixed random matrix."""
    width = states.shape[-1]
    return states @ (fixed(width, classes) / width**0.5).to(states)


def fixed(rows: int, columns: int) -> torch.Tensor:
    """A random matrix from a fixed seed."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1_000_003 + columns))
