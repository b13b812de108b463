"""Evaluation metrics: name, title, unit, and whether higher is better.

Free of torch: the statistics and the report use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TITLES = {"loss": "Loss", "bits_per_byte": "Bits per byte", "accuracy": "Accuracy"}
"""Column headings of the fields of an evaluation."""


@dataclass(frozen=True)
class Metric:
    """A metric by which runs are compared."""

    name: str
    """Name in the stored rows of a comparison."""
    field: str
    """Field in an evaluation record and in a row."""
    title: str
    """Name in a sentence."""
    unit: str = ""
    higher: bool = False
    """Whether higher is better."""
    beside: tuple[str, ...] = ()
    """Other fields of the evaluation shown with it."""
    guess: str = "the unigram entropy"
    """What to call the loss of a model that only knows how often each target occurs."""

    @property
    def sign(self) -> float:
        """Factor on differences under which lower is better."""
        return -1.0 if self.higher else 1.0

    @property
    def comparative(self) -> Literal["higher", "lower"]:
        return "higher" if self.higher else "lower"

    @property
    def superlative(self) -> Literal["highest", "lowest"]:
        return "highest" if self.higher else "lowest"

    @property
    def axis(self) -> str:
        """Label of a plot axis."""
        return self.title.capitalize() + (f" ({self.unit})" if self.unit else "")


LOSS = Metric("val_loss", "loss", "validation loss", "nats", beside=("bits_per_byte",))
MASKED_LOSS = Metric("val_masked_loss", "loss", "validation loss of masked tokens", "nats", beside=("accuracy",))
ACCURACY = Metric(
    "val_accuracy", "accuracy", "validation accuracy", higher=True, beside=("loss",), guess="the entropy of the classes"
)

_KNOWN = {metric.name: metric for metric in (LOSS, MASKED_LOSS, ACCURACY)}


def metric_named(name: str) -> Metric:
    """The metric of a name in stored rows; an unknown one is taken as a loss."""
    return _KNOWN.get(name) or Metric(name, "loss", name.replace("_", " "))
