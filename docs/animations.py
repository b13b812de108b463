"""Write the moving pictures of docs/concepts.md: tokens on the sphere, and a state on its way through 48 blocks.

`make figures` runs it. Both are small SVG files; everything that they depend on is fixed here.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from moving_svg import curve_panel, picture, sphere_panel

import normlab
from normlab.norms import rms

FIGURES = Path(__file__).parent / "figures"
SCHEMES = ("post", "pre", "peri", "geonorm")
DEPTH, DIM, TOKENS = 48, 256, 128
LARGEST = 10.0
"""The state's RMS at the top of the panels; the scale is logarithmic, from 1."""


def tokens() -> str:
    """32 tokens that attract each other through attention, under four schemes, for ten layers."""
    found = normlab.simulate(list(SCHEMES), tokens=32, dim=3, beta=1.0, time=10.0, looks=40, seed=1, device="cpu")
    panels = [
        sphere_panel(run.scheme, run.paths, run["cosine"].mean, f"radius 1 → {run['radius'].mean[-1]:.1f}")
        for run in found.runs
    ]
    return picture("Tokens on the sphere during ten layers of attention, under four schemes", panels)


@torch.no_grad()
def states(scheme: str) -> tuple[list[float], list[float]]:
    """RMS after every block of a random decoder, and the mean angle by which the block turned a token."""
    torch.manual_seed(0)
    config = normlab.DecoderConfig(scheme=scheme, depth=DEPTH, dim=DIM, heads=8, max_length=TOKENS, init_std=DIM**-0.5)
    model = normlab.Decoder(config)
    model.embedding.weight.normal_()
    seen: list[torch.Tensor] = []
    for module in (model.stack.entry, *model.stack.layers):
        module.register_forward_hook(lambda _module, _inputs, state: seen.append(model.stack.hidden(state).double()))
    model(torch.randint(0, config.vocab_size, (2, TOKENS)))
    turns = [float(normlab.geometry.angle(*pair).mean()) for pair in itertools.pairwise(seen)]
    return [float(rms(state).mean()) for state in seen[1:]], turns


def depth() -> str:
    """Size of the state and turn of each block, through 48 blocks at initialisation."""
    panels: list[str] = []
    for scheme in SCHEMES:
        sizes, turns = states(scheme)
        grown = [math.log(size / sizes[0]) / math.log(LARGEST) for size in sizes]
        notes = (f"size ×{sizes[-1] / sizes[0]:.3g}", f"last block turns {math.degrees(turns[-1]):.2g}°")
        panels.append(curve_panel(scheme, grown, [turn / (math.pi / 2) for turn in turns], notes))
    return picture("Size of the state (blue) and angle that each block turns it by (red), through 48 blocks", panels)


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, drawing in (("tokens", tokens()), ("depth", depth())):
        (FIGURES / f"{name}.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
