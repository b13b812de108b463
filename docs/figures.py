"""Draw the README's figure: how the state of each scheme grows through 48 blocks, at initialisation.

Needs matplotlib (`pip install ".[plots]"`). `make figures` runs it; the decoder, its width and the seed are fixed here.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # an extra of its own
import torch

import normlab
from normlab.norms import rms

DEPTH, DIM, TOKENS = 48, 256, 128
FIGURES = Path(__file__).parent / "figures"


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


def main() -> None:
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "normlab"})
    figure, axes = plt.subplots(figsize=(8, 4.2))
    curves = {name: growth(name) for name in normlab.list_schemes()}
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    # NaN is where the state left fp32: the largest of all.
    ranked = sorted(curves.items(), key=lambda item: -item[1][-1] if item[1][-1] < float("inf") else float("-inf"))
    for colour, (name, curve) in zip(colours, ranked, strict=False):
        end = f"×{curve[-1]:.3g}" if curve[-1] < float("inf") else "overflows"
        axes.plot(curve, label=f"{name}  {end}", color=colour, linewidth=1.6)
    axes.set(xlabel="block", ylabel="RMS of the state, relative to the entry", title="State growth at initialisation")
    axes.set(yscale="log", xlim=(0, DEPTH), ylim=(0.7, 100))
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title="after 48 blocks")
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "growth.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
