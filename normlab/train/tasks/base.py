"""What a run learns: which model, which data, how they meet, and what it is judged by.

The loop, the comparison and the page ask a task and never which one it is. Importing a task does not import torch: the
command line lists them in its help.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from normlab.models.config import TransformerConfig
from normlab.train.metrics import Metric

if TYPE_CHECKING:
    import numpy as np
    import torch

    from normlab.data.batch_loader import Batch, SampleSequence
    from normlab.models.transformer import Transformer
    from normlab.train.config import TrainConfig
    from normlab.train.storage.folder import RunFolder


class Data(Protocol):
    """What a task opens: two sides, known by what is in them."""

    @property
    def fingerprint(self) -> str: ...

    def facts(self) -> dict[str, Any]: ...

    def describe(self) -> str: ...


class Task(ABC):
    """One kind of training."""

    name: ClassVar[str]
    about: ClassVar[str]
    """What is learnt, in a few words."""
    model: ClassVar[type[TransformerConfig]]
    fields: ClassVar[tuple[str, ...]]
    """The fields of a run that not every task has, and this one does."""
    data: ClassVar[tuple[str, ...]]
    """The built-in data."""
    val_fraction: ClassVar[float]
    """Share of the data that is held out, unless the user names another."""
    metric: ClassVar[Metric]

    def settled(self, config: TrainConfig) -> dict[str, Any]:
        """What the task says in fields of a run where the user says nothing."""
        return {
            "model": config.model or self.model(),
            "data": config.data or self.data,
            "val_fraction": config.val_fraction or self.val_fraction,
        }

    @abstractmethod
    def check(self, config: TrainConfig) -> None:
        """Raise where a run's fields cannot be trained with."""

    @abstractmethod
    def fitted(self, config: TrainConfig) -> TransformerConfig:
        """The model, made to fit the run's other fields."""

    @abstractmethod
    def sequence(self, config: TrainConfig) -> int:
        """Tokens of a sample."""

    @abstractmethod
    def steps(self, config: TrainConfig) -> int:
        """Optimiser steps."""

    def of_preset(self, size: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the run that go with a named size of the model."""
        return {}

    @abstractmethod
    def open(self, config: TrainConfig, *, progress: bool) -> Any:
        """The data of a run, made ready."""

    @abstractmethod
    def with_answers(self, config: TrainConfig, data: Any) -> TransformerConfig:
        """The model with as many answers as the data asks for."""

    @abstractmethod
    def line(self, config: TrainConfig, data: Any) -> SampleSequence:
        """The samples to train on, in their order."""

    @abstractmethod
    def evaluation(self, config: TrainConfig, data: Any, *, batch: int, **places: Any) -> Iterator[Batch]:
        """The samples to evaluate on, each once."""

    @abstractmethod
    def evaluation_samples(self, config: TrainConfig, data: Any) -> int:
        """How many samples an evaluation has."""

    def measure(self, model: Transformer) -> Callable[..., torch.Tensor]:
        """From a batch to means over its targets, to be averaged over all of them."""
        return model.loss_and_accuracy

    @abstractmethod
    def target_counts(self, config: TrainConfig, data: Any) -> tuple[np.ndarray, np.ndarray]:
        """How often each answer is a target: in training, and in an evaluation."""

    def guess_loss(self, config: TrainConfig, data: Any) -> float:
        """Loss of a model that knows nothing but how often each answer occurs, in nats a target."""
        from normlab.data.frequencies import unigram_cross_entropy

        return unigram_cross_entropy(*self.target_counts(config, data))

    def echo(self, model: Transformer, batch: Batch) -> float | None:
        """Mean probability that the model gives to the token just read; None where that is never the answer."""
        return None

    def scores(self, means: Sequence[float], data: Any) -> dict[str, float]:
        """What an evaluation says, by name, from the means of what was measured."""
        loss, accuracy = means
        return {"loss": loss, "accuracy": accuracy}

    @abstractmethod
    def keep(self, data: Any, folder: RunFolder) -> None:
        """Write down what is needed to use the model."""

    @abstractmethod
    def describe(self, scores: Mapping[str, float]) -> str:
        """An evaluation in one line for a person."""
