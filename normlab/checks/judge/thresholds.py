"""Thresholds of all verdicts. Every verdict prints its number and the threshold."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.errors import NormLabError


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of all verdicts. Growth is that of the RMS throughout: p = 1 in RMS is p = 2 in variance."""

    least_depth: int = 12
    """Growth is never judged on a stack with fewer blocks: there a power law looks like an exponential."""
    kappa_ratio: float = 0.75
    """Exploding needs κ(2L)/κ(L) above this: a power law halves κ when the depth doubles, an exponential keeps it."""
    kappa_depth: float = 0.7
    """Exploding needs κL above this: less than a doubling of the state is no explosion, whatever its shape."""
    bend: float = 0.7
    """Exploding needs κ of the upper half of the blocks above this share of κ of the lower half: log RMS bends in a
    power law (0.39), and in a random walk whose increments begin to line up (0.6), which p and κ(2L)/κ(L) mistake."""
    p_linear: float = 1.2
    """Exploding and super-linear need an exponent p above this."""
    p_one_seed: float = 0.5
    """Half the interval of p where one seed gives none: four deviations of what seeds differ by (0.13 for Qwen3).
    Super-linear and shrinking need an interval that excludes the milder class."""
    p_walk: float = 0.65
    """Linear from here on, a random walk below."""
    p_bounded: float = 0.1
    """Bounded where |p| is below this."""

    gradient_low: float = 1e-2
    """Vanishing where G, the gradient's gain from the last block to the first, is below this at the target depth."""
    gradient_high: float = 1e3
    """Exploding where G is above this at the target depth."""
    gradient_moved: float = 10.0
    """Unsteady where G changed by more than this factor during the burst."""

    cosine: float = 0.95
    """Collapse needs two tokens of a sequence to have a larger cosine than this after the last block..."""
    rank: float = 2.0
    """... or an effective rank below this, and either of the two again when the mean of all tokens is taken off: while
    a model learns how often each token occurs, all states get one part in common (cosines to 0.99), and lose it."""
    spread: float = 2.0**-8
    """Collapse, too, where tokens lie nearer to their mean than this share of their size: to bf16 they are the same."""

    dead_angle: float = 0.02
    """Dead depth needs a mean angle in the last third of the blocks below this, in radians..."""
    dead_share: float = 0.05
    """... and below this share of the mean angle in the first third."""

    low_entropy_heads: float = 0.1
    """Attention warns where more than this share of a block's heads have a normalised entropy below 0.05..."""
    entropy_gap: float = 5.0
    """... or any head has while every other head's entropy is above this many times 0.05."""
    logit_warn: float = 50.0
    """Largest attention score that passes without a warning."""
    logit_fail: float = 100.0
    """Largest attention score that does not fail."""

    update_low: float = 1e-4
    """Least relative update of a block's weights in a step; 1e-3 is typical."""
    update_high: float = 1e-2
    """Largest relative update of a block's weights in a step."""

    absorb_warn: float = 0.1
    """Share of increments that bf16 may round away without a warning."""
    absorb_fail: float = 0.5
    """Share of increments that bf16 may round away without failing."""
    headroom_bits: float = 4.0
    """Least distance to the largest fp16 number, in bits."""
    outlier_ratio: float = 100.0
    """Largest entry in units of the RMS."""

    leak: float = 5e-4
    """Largest share of a change in later tokens, or in another sample, by which an output may move: rounding."""
    norm_exponent: float = 0.5
    """What branches add, and logits, may grow at most like the state to this power: 0 behind a norm, 1 without."""
    own_exponent: float = 0.9
    """The same at the state's own size, where a norm is taken for switched off by its epsilon: half of this would be an
    epsilon as large as the state's square, which halves what the norm does."""
    skip_gain: float = 0.02
    """A skip is taken for one of gain 1 within this: what a branch adds along the state is part of the measure."""
    skip_low: float = 0.1
    """Least product of all skip gains that warns and does not fail."""
    skip_high: float = 10.0
    """Largest product of all skip gains that warns and does not fail."""

    start_margin: float = 0.1
    """Nats by which a first loss may exceed ln V and what random logits cost."""
    start_read: float = 0.05
    """Probability of the token just read, before the first step, from which a model echoes."""

    uneven: float = 10.0
    """Uneven where a block's increment, turn, gradient gain or one of its matrices is this many times larger, or
    smaller, than all neighbours'."""

    def __post_init__(self) -> None:
        self._check_order("p_bounded", "p_walk", "p_linear")
        self._check_order("gradient_low", "gradient_high")
        self._check_order("logit_warn", "logit_fail")
        self._check_order("update_low", "update_high")
        self._check_order("absorb_warn", "absorb_fail")
        self._check_order("skip_low", "skip_high")

    def _check_order(self, *names: str) -> None:
        values = [getattr(self, name) for name in names]
        if values != sorted(values):
            raise NormLabError(f"thresholds: {' <= '.join(names)} must hold, got {', '.join(map(str, values))}")
