"""Plots of benchmark results: bandwidth of kernels, speed of schemes relative to Pre-Norm (matplotlib)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError

# pyright: reportMissingImports=false

_FORMATS = (".svg", ".png", ".pdf")
_COLOURS = {"ours": "#0072b2", "liger": "#cc79a7", "quack": "#009e73", "compiled": "#e69f00", "eager": "#999999"}
_NAMES = {"ours": "NormLab", "liger": "Liger", "quack": "quack", "compiled": "torch.compile", "eager": "eager"}


def check_format(path: Path) -> None:
    """Raise if a plot cannot be drawn to this path, before anything is measured."""
    if path.suffix not in _FORMATS:
        raise NormLabError(f"cannot draw {path.name!r}; expected a name that ends in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise NormLabError('a plot needs matplotlib; try pip install "normlab[plots]", or leave --plot out')


def draw_kernels(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the fraction of the copy bandwidth over the width, one panel per step and direction."""
    plt = _pyplot()
    steps = list(dict.fromkeys(row["case"] for row in rows))
    figure, panels = plt.subplots(len(steps), 2, figsize=(9, 1.9 * len(steps)), sharey=True, squeeze=False)
    for (i, step), (j, direction) in ((a, b) for a in enumerate(steps) for b in enumerate(("forward", "backward"))):
        found = [row for row in rows if row["case"] == step and row["direction"] == direction]
        _shares(panels[i][j], found)
        panels[i][j].set_title(f"{step}, {direction}", fontsize=9, loc="left")
    panels[0][0].legend(frameon=False, fontsize=8, ncols=3)
    figure.supylabel("share of the copy bandwidth", fontsize=9)
    _save(figure, path)


def _shares(panel: Any, rows: list[dict[str, Any]]) -> None:
    shapes = [f"{row['shape'][0]}×{row['shape'][1]}" for row in rows]
    for name in ("ours", "liger", "quack", "compiled", "eager"):
        if name != "ours" and not all(name in row["others"] for row in rows):
            continue
        ratio = [1.0 if name == "ours" else row[f"over_{name}"] for row in rows]
        shares = [row["share"] / r for row, r in zip(rows, ratio, strict=True)]
        panel.plot(shapes, shares, marker="o", markersize=3, color=_COLOURS[name], label=_NAMES[name])
    panel.set_ylim(0, 1.05)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)


def draw_steps(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot tokens per second relative to Pre-Norm: median and range of the paired repeats."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(7, 0.32 * len(rows) + 1))
    ranked = sorted(rows, key=lambda row: row["over_pre"])
    for place, row in enumerate(ranked):
        panel.plot([min(row["paired"]), max(row["paired"])], [place, place], color=_COLOURS["ours"], linewidth=2)
        panel.plot(row["over_pre"], place, "o", color=_COLOURS["ours"])
    panel.set_yticks(range(len(ranked)), [f"{row['scheme']} ({row['kernels']})" for row in ranked], fontsize=8)
    panel.axvline(1.0, color="#999999", linewidth=1)
    panel.set_xlabel("tokens a second over Pre-Norm's", fontsize=9)
    panel.grid(alpha=0.25, axis="x")
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "normlab", "font.size": 9})
    return plt


def _save(figure: Any, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(part, format=path.suffix[1:], bbox_inches="tight", dpi=150, metadata=metadata)
    part.replace(path)
