"""Draw the README's figure: how the state of each scheme grows through 48 blocks, at initialisation.

Needs matplotlib (`pip install ".[plots]"`). `make figures` runs it; the decoder, its width and the seed are fixed here.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own
import torch

import normlab
from normlab.norms import rms

DEPTH, DIM, TOKENS = 48, 256, 128
FIGURES = Path(__file__).parent / "figures"
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


def main() -> None:
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "normlab"})
    figure, axes = plt.subplots(figsize=(8, 4.2))
    groups = together({name: growth(name) for name in normlab.list_schemes()})
    for colour, (names, curve) in zip(plt.get_cmap("tab10").colors, groups, strict=False):  # type: ignore[attr-defined]
        end = f"×{curve[-1]:.3g}" if curve[-1] < math.inf else "overflows"
        axes.plot(curve, label=textwrap.fill(f"{', '.join(names)}: {end}", 26), color=colour, linewidth=1.6)
    axes.set(xlabel="block", ylabel="RMS of the state, relative to the entry", title="State growth at initialisation")
    axes.set(yscale="log", xlim=(0, DEPTH), ylim=(0.1, TOP))
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title="after 48 blocks")
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "growth.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
