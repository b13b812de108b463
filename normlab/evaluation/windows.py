"""Windows over a text, and the negative log-likelihood of every token in them, each token scored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from normlab.models.decoder import Decoder


class Window(NamedTuple):
    """Positions [start, stop) of the inputs; targets from `first` on are scored, those before were scored already."""

    start: int
    first: int
    stop: int


class WindowSum(NamedTuple):
    """The scored tokens of one window."""

    nats: float
    tokens: int


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Sliding windows that score every position once.

    Every token but those of the first window is predicted from at least `length - stride` earlier ones.
    """
    scored = 0
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens)
        yield Window(start, scored, stop)
        if stop == tokens:
            return
        scored = stop


def window_sums(
    decoder: Decoder, ids: np.ndarray, *, length: int, stride: int, batch: int
) -> Iterator[list[WindowSum]]:
    """Sums of -ln p over the scored tokens of each window of `ids[1:]`, a batch at a time; `ids[0]` is only read."""
    return sums(decoder, ids, windows(len(ids) - 1, length, stride), batch=batch)


def sums(decoder: Decoder, ids: np.ndarray, places: Iterable[Window], *, batch: int) -> Iterator[list[WindowSum]]:
    """Sums of -ln p over the scored tokens of each window, a batch at a time."""
    left = iter(places)
    while part := list(islice(left, batch)):
        yield _sums(decoder, ids, part)


@torch.no_grad()
def _sums(decoder: Decoder, ids: np.ndarray, part: Sequence[Window]) -> list[WindowSum]:
    device = decoder.embedding.weight.device
    longest = max(window.stop - window.start for window in part)
    # Padding on the right: causal attention never looks there.
    inputs = np.zeros((len(part), longest), np.int64)
    for row, window in zip(inputs, part, strict=True):
        row[: window.stop - window.start] = ids[window.start : window.stop]
    features = decoder.features(torch.from_numpy(inputs).to(device))
    return [_sum(decoder, row, ids, window) for row, window in zip(features, part, strict=True)]


def _sum(decoder: Decoder, features: torch.Tensor, ids: np.ndarray, window: Window) -> WindowSum:
    # One row at a time: the logits of a whole batch may not fit into memory.
    scored = features[None, window.first - window.start : window.stop - window.start]
    targets = torch.from_numpy(ids[window.first + 1 : window.stop + 1].astype(np.int64)).to(features.device)
    logits = decoder.logits(scored)[0]
    # At least float32: the sum of exponentials in bf16 has three digits.
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().sum()
    return WindowSum(float(nats), len(targets))
