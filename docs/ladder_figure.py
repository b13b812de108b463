"""Draw the gaps of a ladder as one figure: a panel for each scheme, a line for each size through its budgets, and the
forecast of the largest size behind what came. `make figures` draws ladder.svg from the rows of the study of that name.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own

from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.plots import plot_data
from normlab.pages.numbers import format_count

APART = 0.16
"""Distance of two sizes at one budget, as a share of the distance of two budgets."""


def draw_ladder(content: LadderReport, path: Path) -> Any:
    """Gaps with intervals over tokens and sizes, and forecasts as boxes."""
    data = plot_data(content)
    entries = data["gaps"]
    # Two or three panels side by side: with more the type would be too small on a telephone.
    columns = 3 if len(entries) % 3 == 0 else min(2, len(entries))
    rows = math.ceil(len(entries) / columns)
    size = (0.9 + 6.3 * min(1.0, columns / 2), 1.2 + 2.7 * rows)
    figure, panels = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in panels.flat[len(entries) :]:
        axes.set_axis_off()
    for axes, entry in zip(panels.flat, entries, strict=False):
        name = data["schemes"][entry["scheme"]]["label"]
        axes.set_title(textwrap.fill(name, 18), fontsize="medium")
        axes.use_sticky_edges = False  # a box that ended at the edge of its panel would look cut off
        _draw_gaps(axes, entry["cells"], data)
        _draw_forecast(axes, [box for box in data["forecast"] if box["scheme"] == entry["scheme"]], data)
        _name_budgets(axes, data["budgets"])
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    figure.supylabel(f"loss less that of {data['baseline']} (nats)", fontsize="medium")
    _legend(figure, data)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return figure


def _draw_gaps(axes: Any, cells: list[dict[str, Any]], data: dict[str, Any]) -> None:
    """A line through the budgets of every size; a cell that enters no fit is hollow and has no interval."""
    for place, size in enumerate(data["sizes"]):
        own = sorted((cell for cell in cells if cell["size"] == size), key=lambda cell: cell["tokens"])
        at = [_place(data, size, cell["tokens"]) for cell in own]
        colour = _colour(place)
        axes.plot(at, [cell["mean"] for cell in own], color=colour, linewidth=1.4)
        for x, cell in zip(at, own, strict=True):
            face = colour if cell["usable"] else "white"
            axes.plot(x, cell["mean"], "o", color=colour, markerfacecolor=face, markersize=6)
            if cell["low"] is not None:
                axes.vlines(x, cell["low"], cell["high"], color=colour, linewidth=1.8)
    axes.axhline(0.0, color="0.3", linewidth=1.0)
    axes.grid(axis="y", alpha=0.25)


def _draw_forecast(axes: Any, boxes: list[dict[str, Any]], data: dict[str, Any]) -> None:
    """What the smaller sizes forecast, as a box around the place of the largest."""
    for box in boxes:
        middle = _place(data, data["sizes"][-1], box["tokens"])
        axes.bar(
            middle, box["high"] - box["low"], width=APART, bottom=box["low"], color=_colour(len(data["sizes"]) - 1),
            alpha=0.22, linewidth=0,
        )  # fmt: skip


def _place(data: dict[str, Any], size: str, tokens: int) -> float:
    """On the axis of budgets; sizes stand beside each other."""
    sizes = data["sizes"]
    return data["budgets"].index(tokens) + APART * (sizes.index(size) - (len(sizes) - 1) / 2)


def _colour(place: int) -> Any:
    return plt.get_cmap("tab10").colors[place % 10]  # type: ignore[attr-defined]


def _name_budgets(axes: Any, budgets: list[int]) -> None:
    axes.set_xticks(range(len(budgets)), [format_count(tokens) for tokens in budgets])
    axes.set_xlim(-0.5, len(budgets) - 0.5)


def _legend(figure: Any, data: dict[str, Any]) -> None:
    lines = [
        plt.Line2D([], [], color=_colour(k), marker="o", label=size.replace("x", "×"))  # type: ignore[attr-defined]
        for k, size in enumerate(data["sizes"])
    ]
    if data["forecast"]:
        colour = _colour(len(data["sizes"]) - 1)
        lines.append(plt.Rectangle((0, 0), 1, 1, color=colour, alpha=0.22, linewidth=0, label="forecast"))  # type: ignore[attr-defined]
    columns = min(3, len(lines))
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False, columnspacing=1.2)
