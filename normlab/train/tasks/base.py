"""Interface of a training task: how data is read, batched, evaluated and described.

The training loop, the comparison and the report ask the task and never which one it is. What a task can be configured
with is in its configuration class, `Task.config`. Importing a task does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from normlab.models.config import TransformerConfig
from normlab.train.config import TrainConfig
from normlab.train.metrics import Metric

if TYPE_CHECKING:
    import numpy as np
    import torch

    from normlab.data.batch_loader import Batch, SampleSequence
    from normlab.models.transformer import Transformer
    from normlab.train.storage.folder import RunFolder


class Data(Protocol):
    """A data set as a task opens it: a training and a validation part, identified by a hash of their content."""

    @property
    def fingerprint(self) -> str: ...

    def facts(self) -> dict[str, Any]: ...

    def describe(self) -> str: ...


class Task(ABC):
    """A training task. `config` is an instance of `Task.config`, `data` what `open` returned."""

    config: ClassVar[type[TrainConfig]]
    """Configuration class of a run of this task."""
    metric: ClassVar[Metric]
    """The number by which runs are compared."""
    evaluated_at_once: ClassVar[int] = 1
    """Samples of an evaluation batch for each one of a training batch; more than 1 only where no logits are kept."""

    @property
    def name(self) -> str:
        """The value of `TrainConfig.task`."""
        return self.config.task

    @abstractmethod
    def open(self, config: Any, *, progress: bool) -> Any:
        """Read and prepare the data of a run."""

    def check_sources(self, config: Any) -> None:
        """Raise if what `open` would read is not there, as far as that is known without reading it."""
        return

    @abstractmethod
    def with_answers(self, config: Any, data: Any) -> TransformerConfig:
        """The model with the vocabulary size or the number of classes of the data."""

    @abstractmethod
    def line(self, config: Any, data: Any) -> SampleSequence:
        """The training samples in their order."""

    @abstractmethod
    def evaluation(self, config: Any, data: Any, *, batch: int, **places: Any) -> Iterator[Batch]:
        """Batches of the validation samples, each sample once."""

    def few_samples(self, config: Any, data: Any, most: int, **places: Any) -> Batch:
        """The first validation samples, at most `most`, without any padding: for measures of all tokens."""
        count = min(most, self.evaluation_samples(config, data))
        return next(self.evaluation(config, data, batch=count, **places))

    @abstractmethod
    def evaluation_samples(self, config: Any, data: Any) -> int:
        """Number of samples of an evaluation."""

    def validation_sets(self, data: Any) -> dict[str, Any]:
        """Further validation sets, evaluated at the end of a run: by name the data with that validation part."""
        return {}

    def measure(self, model: Transformer) -> Callable[..., torch.Tensor]:
        """A function from a batch to the means of the measures over its targets."""
        return model.loss_and_accuracy

    @abstractmethod
    def target_counts(self, config: Any, data: Any) -> tuple[np.ndarray, np.ndarray]:
        """How often each token or class is a target: in training, and in an evaluation."""

    def guess_loss(self, config: Any, data: Any) -> float:
        """Loss of a model that only knows how often each target occurs (unigram entropy), in nats per target."""
        from normlab.data.frequencies import unigram_cross_entropy

        return unigram_cross_entropy(*self.target_counts(config, data))

    def echo(self, model: Transformer, batch: Batch) -> float | None:
        """Mean probability that the model gives to the input token itself; None where that is never the target."""
        return None

    def copying(self, model: Transformer, batch: Batch) -> dict[str, float | None]:
        """Fields of a profile that say how well the model copies from its context; none where it cannot."""
        return {}

    def scores(self, means: Sequence[float], data: Any) -> dict[str, float]:
        """The result of an evaluation by name, from the means of the measures."""
        loss, accuracy = means
        return {"loss": loss, "accuracy": accuracy}

    @abstractmethod
    def keep(self, data: Any, folder: RunFolder) -> None:
        """Save what is needed to use the model: tokenizer, or names of the classes."""

    @abstractmethod
    def describe(self, scores: Mapping[str, float]) -> str:
        """An evaluation in one line of text."""
