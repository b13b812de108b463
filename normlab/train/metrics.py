"""What a run is judged by, and what stands beside it: names in files, words for people, and which way is better.

Free of torch: the statistics and the page ask here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TITLES = {"loss": "Loss", "bits_per_byte": "Bits per byte", "accuracy": "Accuracy"}
"""The fields of an evaluation, as headings."""


@dataclass(frozen=True)
class Metric:
    """One number of an evaluation by which runs are compared."""

    name: str
    """In the store of a comparison."""
    field: str
    """In the record of an evaluation, and in a row."""
    title: str
    """In a sentence."""
    unit: str = ""
    higher: bool = False
    """Whether a higher value is the better one."""
    beside: tuple[str, ...] = ()
    """Other fields of the evaluation that are shown with it."""
    guess: str = "the entropy of single tokens"
    """The loss of a model that knows nothing but how often each answer occurs, in words."""

    @property
    def sign(self) -> float:
        """What to multiply differences by so that lower is better."""
        return -1.0 if self.higher else 1.0

    @property
    def comparative(self) -> Literal["higher", "lower"]:
        return "higher" if self.higher else "lower"

    @property
    def superlative(self) -> Literal["highest", "lowest"]:
        return "highest" if self.higher else "lowest"

    @property
    def axis(self) -> str:
        """The name of an axis."""
        return self.title.capitalize() + (f" ({self.unit})" if self.unit else "")


LOSS = Metric("val_loss", "loss", "validation loss", "nats", beside=("bits_per_byte",))
MASKED_LOSS = Metric("val_masked_loss", "loss", "validation loss of masked tokens", "nats", beside=("accuracy",))
ACCURACY = Metric(
    "val_accuracy", "accuracy", "validation accuracy", higher=True, beside=("loss",), guess="the entropy of the classes"
)

_KNOWN = {metric.name: metric for metric in (LOSS, MASKED_LOSS, ACCURACY)}


def metric_named(name: str) -> Metric:
    """The metric of a store; one that is not known here is a loss of some kind."""
    return _KNOWN.get(name) or Metric(name, "loss", name.replace("_", " "))
