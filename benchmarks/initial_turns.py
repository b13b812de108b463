"""How far a model turns its tokens before training, and how alike they are after its last block, by initial std.

python benchmarks/initial_turns.py --schemes post pre --stds 0.005 0.02 0.04
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro

from normlab.models import DecoderConfig
from normlab.train.monitor.profile import profile


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to build."""

    schemes: tuple[str, ...] = ("ngpt", "lns", "pre", "peri", "mix", "post")
    stds: tuple[float | None, ...] = (None,)
    """Initial standard deviations; None: the scheme's own."""
    depth: int = 12
    dim: int = 384
    seed: int = 0


def main(arguments: Arguments) -> None:
    tokens = torch.randint(0, 4096, (4, 256), generator=torch.Generator().manual_seed(arguments.seed))
    for scheme in arguments.schemes:
        for std in arguments.stds:
            config = DecoderConfig(
                scheme=scheme, depth=arguments.depth, dim=arguments.dim, heads=6, vocab_size=4096, max_length=256,
                stream="fp32", init_std=std,
            )  # fmt: skip
            model = config.build().init_(generator=torch.Generator().manual_seed(arguments.seed))
            found = profile(model, tokens[:, :-1], tokens[:, 1:])
            turned, cosine = sum(found["angular_speed"][1:]), found["token_cosine"][-1]
            print(f"{scheme}, std {std}: turned by {turned:.2f} in all, cosine {cosine:.3f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
