"""Draw the README's figures: how the state of each scheme grows through 48 blocks at initialisation, and how gains
change with the budget (from the rows of the study books-125m). And that of docs/log.md: cosine and rank of tokens
through depth, before and after training (from the rows of depth-use), beside the laws of the schemes.

Needs matplotlib (`pip install ".[plots]"`). `make figures` runs it; the decoder, its width and the seed are fixed here.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own
import torch

import normlab
from normlab.compare.statistics import rank_schemes
from normlab.compare.store import Store
from normlab.dynamics.result import SchemeRun
from normlab.norms import rms

DEPTH, DIM, TOKENS = 48, 256, 128
FIGURES = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parents[1] / "benchmarks/results/studies"
BUDGETS = RESULTS / "books-125m"
DEPTH_USE = RESULTS / "depth-use" / "main"
LAWS = ("ngpt", "lns", "pre", "peri", "mix", "post")
"""Schemes of that study, in the order of their laws."""
SERIES = {"token_cosine": ("cosine", "mean cosine"), "effective_rank": ("rank", "effective rank")}
"""Series of a profile: the same observable of a simulation, and its title."""
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
    figure, axes = plt.subplots(figsize=(8, 4.2))
    groups = together({name: growth(name) for name in normlab.list_schemes()})
    for colour, (names, curve) in zip(plt.get_cmap("tab10").colors, groups, strict=False):  # type: ignore[attr-defined]
        end = f"×{curve[-1]:.3g}" if curve[-1] < math.inf else "overflows"
        axes.plot(curve, label=textwrap.fill(f"{', '.join(names)}: {end}", 26), color=colour, linewidth=1.6)
    axes.set(xlabel="block", ylabel="RMS of the state, relative to the entry", title="State growth at initialisation")
    axes.set(yscale="log", xlim=(0, DEPTH), ylim=(0.1, TOP))
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title="after 48 blocks")
    figure.savefig(FIGURES / "growth.svg", bbox_inches="tight", metadata={"Date": None})


def draw_budgets() -> None:
    """Differences to the baseline at every budget of a study, with their intervals: budgets.svg."""
    figure, axes = plt.subplots(figsize=(8, 3.0))
    arms = sorted(BUDGETS.glob("tokens=*"), key=lambda arm: int(arm.name.removeprefix("tokens=").removesuffix("M")))
    standings = [rank_schemes(Store(arm).rows(), "pre") for arm in arms]
    schemes = [own.scheme for own in standings[0] if own.difference is not None]
    for place, (colour, scheme) in enumerate(zip(plt.get_cmap("tab10").colors, schemes, strict=False)):  # type: ignore[attr-defined]
        found = [next(own.difference for own in each if own.scheme == scheme) for each in standings]
        known = [(at, one.mean, one.low, one.high) for at, one in enumerate(found) if one is not None]
        at = [at + 0.06 * (place - (len(schemes) - 1) / 2) for at, *_ in known]
        means = [mean for _, mean, *_ in known]
        # One pair of seeds has no interval.
        ends = [
            [0.0 if low is None else mean - low for _, mean, low, _ in known],
            [0.0 if high is None else high - mean for _, mean, _, high in known],
        ]
        axes.errorbar(at, means, yerr=ends, label=scheme, color=colour, marker="o", capsize=3, linewidth=1.2)
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.set(ylabel="loss less Pre-Norm's (nats)", title="125M on books: the gain shrinks with the budget")
    axes.set_xticks(range(len(arms)), [f"{arm.name.removeprefix('tokens=')} tokens" for arm in arms])
    axes.set_xlim(-0.4, len(arms) - 0.6)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(FIGURES / "budgets.svg", bbox_inches="tight", metadata={"Date": None})


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
    draw_growth()
    draw_budgets()
    draw_depth_use()


if __name__ == "__main__":
    main()
