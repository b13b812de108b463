"""Finished checks made of formulas: every field is filled, and what must be shown is known."""

from __future__ import annotations

import math
from typing import Any

from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.remedies import remedies
from normlab.checks.ladder_records import Ladder
from normlab.checks.result import Check, Look, StepRung, Subject, WidthRung
from normlab.probes.profile import Profile

DEPTHS = (6, 12, 24)
HOSTILE = 'post <script>alert(1)</script> | "x" & [bold]y[/bold]'


def profile(depth: int, step: int = 0, *, growth: float = 0.5, gain: float = 2.0, cosine: float = 0.3) -> Profile:
    """A stack whose state grows like l^growth, whose gradient gains `gain`, whose tokens end at `cosine`."""
    over, up = range(depth), range(depth + 1)
    return Profile(
        boundaries=depth + 1, step=step,
        rms=[1.1 * (1.0 + k) ** growth for k in up],
        mean_abs=[0.9 * (1.0 + k) ** growth for k in up],
        max_abs=[4.0 * (1.0 + k) ** growth for k in up],
        var_entry=[1.2 * (1.0 + k) ** (2 * growth) for k in up],
        var_data=[1.0 * (1.0 + k) ** (2 * growth) for k in up],
        broken=[0.0] * (depth + 1), grad_broken=[0.0] * (depth + 1),
        grad_h=[0.01 * gain ** ((depth - k) / max(depth - 1, 1)) for k in up],
        cos=[cosine * k / depth for k in up], dist_to_mean=[1.0 - cosine * k / depth for k in up],
        erank=[20.0 - 10.0 * cosine * k / depth for k in up], stable_rank=[6.0] * (depth + 1),
        outlier_ratio=[4.0] * (depth + 1), kurtosis=[3.0 + 0.01 * k for k in up],
        top_channels=[[] for _ in up],
        branch_rms=[0.5] * depth, branch_ratio=[0.5 / (1.0 + k) ** growth for k in over],
        align=[0.05 + 0.01 * k for k in over], ang=[0.5 / math.sqrt(1.0 + k) for k in over],
        block_influence=[0.1 / (1.0 + k) for k in over], absorb_bf16=[0.001 * k / depth for k in over],
        grad_w=[0.2] * depth, upd_ratio=[0.002] * depth, attn_entropy=[0.9 - 0.2 * k / depth for k in over],
        attn_entropy_low_share=[0.0] * depth, logit_max=[2.0 + 0.1 * k for k in over], sink=[0.05] * depth,
        loss=4.3 - 0.02 * step, logits_rms=1.0, logsumexp=4.2,
    )  # fmt: skip


def ladder(depths: tuple[int, ...] = DEPTHS, *, burst: bool = True, **shape: float) -> Ladder:
    steps = (0, 30) if burst else (0,)
    return Ladder(tuple(profile(depth, step, **shape) for depth in depths for step in steps))


def check(rungs: Ladder | None = None, *, name: str = "pre", **more: Any) -> Check:
    """What `normlab check` returns, without the minute that it takes."""
    rungs = rungs or ladder()
    verdicts = judge_ladder(rungs)
    target = Subject(
        name=name, kind="scheme", depth=rungs.depths[-1], width=64, parameters=1_234_567, scheme=name, unigram=4.1,
        notes=more.pop("notes_of_target", ()),
    )  # fmt: skip
    filled: dict[str, Any] = {
        "target": target,
        "config": {"depths": list(rungs.depths), "steps": 30, "lr": 1e-3, "seeds": 1},
        "ladder": rungs,
        "verdicts": tuple(verdicts),
        "remedies": tuple(remedy.words for remedy in remedies(verdicts)),
        "seconds": 12.5,
        "versions": {"normlab": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "command": ("normlab", "check", name),
        "curves": {str(depth): tuple(4.3 - 0.02 * step for step in range(30)) for depth in rungs.depths},
    }
    return Check(**filled | more)


def exploding(**more: Any) -> Check:
    """A design without any norm: a state that grows without measure, and a gradient that does the same."""
    return check(ladder(growth=2.5, gain=1e6, cosine=0.2), name="none", **more)


def collapsing(**more: Any) -> Check:
    """What happens to Post-LN: nothing is left of the gradient, and all tokens are one."""
    return check(ladder(gain=1e-7, growth=0.0, cosine=0.999), name="post", **more)


def ladders() -> dict[str, Any]:
    """Width and step ladders, for the fields that are empty otherwise."""
    return {
        "widths": tuple(WidthRung(width=width, ladder=ladder((12,))) for width in (32, 64, 128)),
        "steps": tuple(
            StepRung(
                step=step, depth=24, before=Look(rms=1.0 + 5.0 * step, G=1.2, loss=4.3),
                after=Look(rms=1.0 + 9.0 * step, G=1.0 + 8.0 * step, loss=3.0 + 0.6 * step),
            )
            for step in (0.1, 0.3, 1.0)
        ),
    }  # fmt: skip
