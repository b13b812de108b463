"""Draw the README's figures: how the state of each scheme grows through 48 blocks at initialisation, and how gains
change with the budget (from the rows of the study books-125m).

Needs matplotlib (`pip install ".[plots]"`). `make figures` runs it; the decoder, its width and the seed are fixed here.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own
import torch

import normlab
from normlab.compare.statistics import rank_schemes
from normlab.compare.store import Store
from normlab.norms import rms

DEPTH, DIM, TOKENS = 48, 256, 128
FIGURES = Path(__file__).parent / "figures"
BUDGETS = Path(__file__).parents[1] / "benchmarks/results/studies/books-125m"
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


def main() -> None:
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "normlab"})
    FIGURES.mkdir(exist_ok=True)
    draw_growth()
    draw_budgets()


if __name__ == "__main__":
    main()
