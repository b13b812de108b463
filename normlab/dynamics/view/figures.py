"""Figures as plain data: curves with bands, and heat maps; independent of the plotting library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Role = Literal["data", "theory", "model"]
"""Measured in a simulation, predicted by theory, or measured in a network."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, or points if `marks` is set."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Band around the curve; empty for none."""
    role: Role = "data"
    marks: bool = False


@dataclass(frozen=True, kw_only=True)
class Image:
    """A heat map: values on a grid, one row for each y."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    label: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot."""

    title: str
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    curves: tuple[Curve, ...] = ()
    image: Image | None = None


def make_curve(
    name: str,
    x: Iterable[float],
    y: Iterable[float],
    *,
    low: Iterable[float] = (),
    high: Iterable[float] = (),
    role: Role = "data",
    marks: bool = False,
) -> Curve:
    """Build a curve from any sequences of numbers."""
    x, y, low, high = (tuple(float(value) for value in values) for values in (x, y, low, high))
    return Curve(name=name, x=x, y=y, low=low, high=high, role=role, marks=marks)


def make_image(x: Iterable[float], y: Iterable[float], values: Iterable[Iterable[float]], label: str) -> Image:
    """Build a heat map from any sequences of numbers."""
    rows = tuple(tuple(float(value) for value in row) for row in values)
    return Image(x=tuple(map(float, x)), y=tuple(map(float, y)), values=rows, label=label)
