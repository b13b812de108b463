"""A made-up ladder with the shape of a real one: rows, design, forecast, a lost run, text that attacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from normlab.ladders.report.design import (
    CellFacts,
    ForecastCell,
    ForecastFacts,
    LadderDesign,
    LostRun,
    RateRule,
    RateSearchFacts,
    SizeFacts,
    TriedRate,
)
from normlab.ladders.rows import LadderRow

HOSTILE = "spannorm <script>alert(1)</script> | <b>b</b> %{x} & co"
SCHEMES = ("pre", "peri", "geonorm", HOSTILE)
BUDGETS = (29_500_000, 59_000_000, 118_000_000)
BATCH = 16_384
# Label: parameters, share of the embedding, FLOPs a token (vocabulary 32,768, length 512).
SIZES = {
    "4x256": (11_600_000, 0.72, 76e6),
    "6x384": (23_200_000, 0.54, 153e6),
    "8x512": (42_500_000, 0.39, 280e6),
    "12x768": (110_100_000, 0.23, 717e6),
}
TOP = "12x768"
TOP_FLOPS = 717e6 * BUDGETS[-1]


def gap(scheme: str, tokens: int, flops: float) -> float:
    """True gap to the baseline: peri's shrinks with compute, geonorm's crosses zero with tokens."""
    c = flops / TOP_FLOPS
    return {"pre": 0.0, "peri": -0.025 * c**-0.3, "geonorm": 0.02 + 0.05 * math.log(tokens / 100e6) / 1.1}.get(
        scheme, -0.03 + 0.004 * math.log(c)
    )


def rows(
    *,
    schemes: Sequence[str] = SCHEMES,
    sizes: Sequence[str] = tuple(SIZES),
    budgets: Sequence[int] = BUDGETS,
    seeds: int = 3,
    top_seeds: int = 2,
    lost: bool = True,
) -> list[LadderRow]:
    """Rows of the grid; one seed of the last scheme is stuck at one cell if `lost`."""
    noise = np.random.default_rng(17)
    found = []
    for size in sizes:
        parameters, _, a_token = SIZES[size]
        for seed in range(1, (min(seeds, top_seeds) if size == TOP else seeds) + 1):
            shared = 0.006 * noise.normal()
            for scheme in schemes:
                trunk = 0.004 * noise.normal()
                for tokens in budgets:
                    base = 2.1 + 0.9 * (parameters / 110e6) ** -0.30 + 1.18 * (tokens / 33e6) ** -0.35
                    own = gap(scheme, tokens, a_token * tokens) + trunk + 0.002 * noise.normal()
                    stuck = lost and scheme == schemes[-1] and (size, seed, tokens) == (sizes[0], 2, budgets[0])
                    found.append(
                        LadderRow(
                            scheme=scheme, size=size, parameters=parameters, tokens=tokens, flops=a_token * tokens,
                            seed=seed, loss=None if stuck else base + shared + own, steps=tokens // BATCH,
                            trunk=f"{scheme}-{size}-{seed}", lr=1e-3, state="stuck" if stuck else "done",
                            tokens_per_s=668e3 * (0.987 if scheme == "geonorm" else 1.0) if size == TOP else None,
                        )
                    )  # fmt: skip
    return found


def design(*, schemes: Sequence[str] = SCHEMES, budgets: Sequence[int] = BUDGETS) -> LadderDesign:
    """Facts of the same grid: geonorm's rate is at the edge of those tried at the smallest size."""
    return LadderDesign(
        command=("normlab", "ladder", "--schemes", *schemes, "--sizes", *SIZES, "--target", "16x1024:400M"),
        date="2026-11-16T20:00:00+00:00", commit="0123456789ab", device="Test GPU & co",
        versions={"normlab": "0.2.0", "torch": "2.11.0", "python": "3.11.2"},
        data="books + science <i>", validation="books", unique_tokens=118_000_000, head="own",
        sizes=tuple(
            SizeFacts(label=label, depth=int(label.split("x")[0]), width=int(label.split("x")[1]), parameters=n,
                      embedding_share=share, flops_per_token=a_token, seeds=2 if label == TOP else 3)
            for label, (n, share, a_token) in SIZES.items()
        ),
        budgets=tuple(budgets),
        cells=tuple(
            CellFacts(size=size, tokens=tokens, steps=tokens // BATCH, epochs=tokens / 118e6, batch=BATCH)
            for size in SIZES for tokens in budgets
        ),
        rates=tuple(
            _search(scheme, size, tokens) for scheme in schemes for size, tokens in
            (("4x256", budgets[0]), ("4x256", budgets[-1]), ("8x512", budgets[0]))
        ),
        rules=tuple(
            RateRule(scheme=scheme, carry="width+depth" if scheme == "pre" else "width",
                     basis="derived" if scheme == "pre" else "hypothesis") for scheme in schemes
        ),
        held_out=TOP,
        forecast=ForecastFacts(
            written="2026-11-16T12:30:00+00:00", commit="0123456789ab", hash="5f2c9d",
            cells=tuple(_forecast(scheme, tokens) for scheme in schemes[1:] for tokens in budgets),
        ),
        lost=(LostRun(name="spannorm-4x256-2-29.5M", state="stuck", reason="no better than unigrams <u>"),),
    )  # fmt: skip


def _search(scheme: str, size: str, tokens: int) -> RateSearchFacts:
    best = 2e-3 if scheme == "geonorm" and size == "4x256" else 1e-3
    tried = [(lr, 4.5 + 0.08 * math.log(lr / best) ** 2) for lr in (5e-4, 1e-3, 2e-3)]
    told = tuple(TriedRate(lr=lr, loss=loss) for lr, loss in tried)
    if scheme == "peri":
        told = (*told[:-1], replace(told[-1], confirmed=1, unconfirmed=1))
        told = (*told, TriedRate(lr=4e-3, loss=7.1, state="stuck"), TriedRate(lr=8e-3, state="diverged"))
    return RateSearchFacts(
        scheme=scheme, size=size, tokens=tokens, tried=told, pick=best, edge="largest" if best == 2e-3 else None
    )


def _forecast(scheme: str, tokens: int) -> ForecastCell:
    flops = SIZES[TOP][2] * tokens
    truth = gap(scheme, tokens, flops)
    # Peri's gap at the largest budget falls outside its interval.
    off = 0.07 if scheme == "peri" and tokens == BUDGETS[-1] else 0.006
    middle = truth + off
    return ForecastCell(
        scheme=scheme, size=TOP, tokens=tokens, flops=flops, smooth=(middle - 0.03, middle + 0.03),
        simple_law=(middle - 0.012, middle + 0.012), came=truth, seeds=2,
    )  # fmt: skip
