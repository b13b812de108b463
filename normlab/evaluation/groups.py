"""Groups of questions that are not independent (the questions on one book), and standard errors that allow for that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Groups = Mapping[str, tuple[float, int]]
"""Mean score and number of questions of every group."""


class GroupedMean(NamedTuple):
    """A mean over questions, with its standard error over groups."""

    mean: float
    stderr: float | None
    """None with a single group."""
    groups: int


def group_scores(scored: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """The groups of (group, score) pairs, one pair for each question."""
    found: dict[str, list[float]] = {}
    for group, score in scored:
        found.setdefault(group, []).append(score)
    return {group: (math.fsum(own) / len(own), len(own)) for group, own in sorted(found.items())}


def grouped_mean(groups: Groups) -> GroupedMean:
    """The mean over all questions; its standard error is that of a ratio over groups, which may differ in size."""
    questions, count = sum(size for _, size in groups.values()), len(groups)
    mean = math.fsum(own * size for own, size in groups.values()) / questions
    if count < 2:
        return GroupedMean(mean, None, count)
    squares = math.fsum((size * (own - mean)) ** 2 for own, size in groups.values())
    return GroupedMean(mean, math.sqrt(count / (count - 1) * squares) / questions, count)
