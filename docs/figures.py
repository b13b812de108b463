"""Draw the README's figures: how the state of each scheme grows through 48 blocks at initialisation, and how gains
change with the budget (from the rows of the study books-125m). And that of docs/log.md: cosine and rank of tokens
through depth, before and after training (from the rows of depth-use), beside the laws of the schemes. The gaps of the
study ladder are drawn as soon as a size has ended (docs/ladder_figure.py).

Needs matplotlib (`pip install ".[plots]"`). `make figures` runs it; the decoder, its width and the seed are fixed here.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own
import torch
from ladder_figure import draw_ladder

import normlab
from normlab.compare.statistics import rank_schemes
from normlab.compare.store import Store
from normlab.dynamics.result import SchemeRun
from normlab.ladders.results import read_report
from normlab.norms import rms

DEPTH, DIM, TOKENS = 48, 256, 128
FIGURES = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parents[1] / "benchmarks/results/studies"
BUDGETS = RESULTS / "books-125m"
LADDER = RESULTS / "ladder" / "main"
DEPTH_USE = RESULTS / "depth-use" / "main"
LAWS = ("ngpt", "lns", "pre", "peri", "mix", "post")
"""Schemes of that study, in the order of their laws."""
SERIES = {"token_cosine": ("cosine", "mean cosine"), "effective_rank": ("rank", "effective rank")}
"""Series of a profile: the same observable of a simulation, and its title."""
LARGE: Any = {"font.size": 15}
"""For the figures of the README, which are also read on a telephone: 400 pixels wide."""
TOP = 100.0
"""Upper end of the axis."""
NEAR = 0.05
"""Largest distance of two curves that share a line, as a difference of logarithms."""


@torch.no_grad()
def growth(name: str) -> list[float]:
    """RMS of the state after every block over that of the first, for random tokens with unit-RMS embeddings."""
    torch.manual_seed(0)
    config = normlab.DecoderConfig(scheme=name, depth=DEPTH, dim=DIM, heads=8, max_length=TOKENS, init_std=DIM**-0.5)
    model = normlab.Decoder(config)
    model.embedding.weight.normal_()
    sizes: list[float] = []

    def note(_module, _inputs, state: torch.Tensor) -> None:
        sizes.append(float(rms(model.stack.hidden(state)).mean()))

    for module in (model.stack.entry, *model.stack.layers):
        module.register_forward_hook(note)
    model(torch.randint(0, config.vocab_size, (4, TOKENS)))
    return [size / sizes[0] for size in sizes]


def together(curves: dict[str, list[float]]) -> list[tuple[list[str], list[float]]]:
    """Schemes whose curves cannot be told apart, with the curve of the first; the fastest growth first."""
    groups: list[tuple[list[str], list[float]]] = []
    for name, curve in curves.items():
        near = (names for names, other in groups if max(map(_distance, curve, other)) < NEAR)
        names = next(near, None)
        groups.append(([name], curve)) if names is None else names.append(name)
    return sorted(groups, key=lambda group: -_size(group[1][-1]))


def _distance(a: float, b: float) -> float:
    """Of two points on the logarithmic axis; points above it are the same."""
    return abs(math.log(min(_size(a), TOP) / min(_size(b), TOP)))


def _size(value: float) -> float:
    # NaN is where the state left fp32: the largest of all.
    return value if value < math.inf else math.inf


def draw_growth() -> None:
    """State growth of every scheme: growth.svg."""
    figure, axes = plt.subplots(figsize=(4.7, 5.0))
    axes.set(yscale="log", xlim=(0, DEPTH), ylim=(0.1, TOP), xlabel="block", ylabel="RMS, relative to the entry")
    axes.set_xticks(range(0, DEPTH + 1, 16))
    axes.set_yticks([0.1, 1, 10, TOP], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    ends: list[End] = []
    groups = together({name: growth(name) for name in normlab.list_schemes()})
    for colour, (names, curve) in zip(plt.get_cmap("tab10").colors, groups, strict=False):  # type: ignore[attr-defined]
        axes.plot(curve, color=colour, linewidth=2.0)
        size = f"×{curve[-1]:.3g}" if curve[-1] < math.inf else "overflows"
        ends.append(End(textwrap.fill(f"{', '.join(names)}: {size}", 27), curve[-1], colour))
    name_ends(axes, ends)
    axes.set_title("State growth at initialisation", fontsize="medium")
    axes.text(1.11, 1.03, "after 48 blocks", transform=axes.transAxes)
    figure.savefig(FIGURES / "growth.svg", bbox_inches="tight", metadata={"Date": None})


def draw_budgets() -> None:
    """Differences to the baseline at every budget of a study, with their intervals: budgets.svg."""
    figure, axes = plt.subplots(figsize=(7.1, 3.8))
    arms = sorted(BUDGETS.glob("tokens=*"), key=lambda arm: int(arm.name.removeprefix("tokens=").removesuffix("M")))
    standings = [rank_schemes(Store(arm).rows(), "pre") for arm in arms]
    schemes = [own.scheme for own in standings[0] if own.difference is not None]
    for place, (colour, scheme) in enumerate(zip(plt.get_cmap("tab10").colors, schemes, strict=False)):  # type: ignore[attr-defined]
        found = [next(own.difference for own in each if own.scheme == scheme) for each in standings]
        known = [(at, one.mean, one.low, one.high) for at, one in enumerate(found) if one is not None]
        at = [at + 0.06 * (place - (len(schemes) - 1) / 2) for at, *_ in known]
        means = [mean for _, mean, *_ in known]
        # One pair of seeds has no interval.
        bars = [
            [0.0 if low is None else mean - low for _, mean, low, _ in known],
            [0.0 if high is None else high - mean for _, mean, _, high in known],
        ]
        axes.errorbar(at, means, yerr=bars, color=colour, marker="o", capsize=4, linewidth=1.8)
        axes.annotate(
            scheme, (at[-1], means[-1]), (11, 0), textcoords="offset points", va="center", backgroundcolor="white"
        )
    axes.axhline(0.0, color="0.3", linewidth=1.0)
    axes.set_xticks(range(len(arms)), [f"{arm.name.removeprefix('tokens=')} tokens" for arm in arms])
    axes.set_xlim(-0.4, len(arms) - 0.6)
    axes.set_yticks([0.0, -0.1, -0.2])
    axes.set_ylabel("loss less Pre-Norm's (nats)")
    axes.grid(axis="y", alpha=0.25)
    axes.set_title("125M on books: the gain shrinks with the budget", fontsize="medium")
    figure.savefig(FIGURES / "budgets.svg", bbox_inches="tight", metadata={"Date": None})


class End(NamedTuple):
    """The right end of a curve, and what is written beside it."""

    text: str
    value: float
    colour: Any


def name_ends(axes: Any, ends: list[End]) -> None:
    """Write beside the axes what each curve is; names that would run into each other stand apart."""
    right = axes.get_xlim()[1]
    at_end = axes.transData.transform([(right, min(_size(end.value), TOP)) for end in ends])
    aims = [float(y) for _, y in axes.transAxes.inverted().transform(at_end)]
    line = 1.35 * plt.rcParams["font.size"] / (72.0 * axes.get_position().height * axes.figure.get_figheight())
    heights = [line * (1 + end.text.count("\n")) for end in ends]
    for end, aim, middle in zip(ends, aims, spread(aims, heights), strict=True):
        # A curve that leaves the axes above has no end to point to.
        start = [(1.0, aim)] if _size(end.value) < TOP else []
        leader = zip(*start, (1.05, middle), (1.09, middle), strict=True)
        axes.plot(*leader, color=end.colour, linewidth=1.6, transform=axes.transAxes, clip_on=False)
        axes.text(1.11, middle, end.text, transform=axes.transAxes, va="center", linespacing=1.1)


def spread(aims: list[float], heights: list[float]) -> list[float]:
    """Middles of labels of these heights near `aims`, between 0 and 1, that do not touch if there is room for all."""
    order = sorted(range(len(aims)), key=lambda k: -aims[k])
    places, free = list(aims), 1.0
    # Down from the top as far as the labels above need, then up again from the bottom.
    for k in order:
        places[k] = min(aims[k], free - heights[k] / 2)
        free = places[k] - heights[k] / 2
    free = 0.0
    for k in reversed(order):
        places[k] = max(places[k], free + heights[k] / 2)
        free = places[k] + heights[k] / 2
    return places


def draw_depth_use() -> None:
    """Cosine and effective rank through trained models beside the laws of their schemes: depth-use.svg."""
    figure, panels = plt.subplots(len(SERIES), len(LAWS), figsize=(11, 4), sharex=True, sharey="row")
    # The setting that the study's file names.
    laws = normlab.simulate(LAWS, tokens=128, dim=128, start="orthonormal", time=24.0, looks=48, device="cpu")
    for column, law in zip(panels.T, laws.runs, strict=True):
        column[0].set_title(law.scheme)
        column[-1].set_xlabel("block")
        for axes, series in zip(column, SERIES, strict=True):
            _draw_beside_law(axes, law, series)
    for axes, (_, title) in zip(panels[:, 0], SERIES.values(), strict=True):
        axes.set_ylabel(title)
    panels[1, 0].set(xticks=(0, 4, 8, 12), yscale="log")
    panels[1, 0].minorticks_off()
    lines = panels[0, 0].get_lines()
    figure.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 1.02), ncols=len(lines), frameon=False)
    figure.savefig(FIGURES / "depth-use.svg", bbox_inches="tight", metadata={"Date": None})


def _draw_beside_law(axes: Any, law: SchemeRun, series: str) -> None:
    observable, _ = SERIES[series]
    # An attention and an MLP in each block are two units of time.
    axes.plot([time / 2 for time in law.times], law[observable].mean, "k:", label="law", linewidth=1.2)
    axes.plot(mean_profile(law.scheme, series, 0), color="tab:orange", label="before training")
    axes.plot(mean_profile(law.scheme, series, -1), color="tab:blue", label="after training")
    axes.grid(alpha=0.25)


def mean_profile(scheme: str, series: str, look: int) -> list[float]:
    """A series through depth at a profiled step, mean over the judged seeds of a scheme."""
    rows = [row for row in Store(DEPTH_USE).rows() if row["scheme"] == scheme and row["role"] == "judge"]
    return [sum(values) / len(rows) for values in zip(*(row["profiles"][look][series] for row in rows), strict=True)]


def main() -> None:
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "normlab"})
    FIGURES.mkdir(exist_ok=True)
    with plt.rc_context(LARGE):
        draw_growth()
        draw_budgets()
        ladder = read_report(LADDER)
        if any(cell.differences for own in ladder.answer.schemes for cell in own.cells):
            draw_ladder(ladder, FIGURES / "ladder.svg")
    draw_depth_use()


if __name__ == "__main__":
    main()
