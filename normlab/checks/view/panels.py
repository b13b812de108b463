"""Panels of the page: the profiles that are drawn, with title, reference line and the verdict on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normlab.checks.judge.thresholds import Thresholds
from normlab.probes.profile import Profile, Series


@dataclass(frozen=True)
class ProfilePanel:
    """One plot over depth."""

    name: str
    title: str
    about: str
    """Description of the curve."""
    read: Callable[[Profile], Series]
    limits: tuple[str, ...] = ()
    """Thresholds drawn as lines, by field name."""
    verdict: str = ""
    """Name of the verdict whose blocks are marked."""
    log: bool = False
    """Whether the curve is first shown on a logarithmic axis."""
    span: tuple[float, float] | None = None
    """Limits of a linear axis that shows the full range of values."""
    main: bool = False
    """Whether it is shown without unfolding the further plots."""

    @property
    def at_boundaries(self) -> bool:
        """Whether it has one number for each boundary; else for each block."""
        return len(self.read(Profile(boundaries=3))) == 3

    def lines(self, thresholds: Thresholds) -> list[float]:
        return [getattr(thresholds, name) for name in self.limits]


PANELS: tuple[ProfilePanel, ...] = (
    ProfilePanel("rms", "Hidden size (RMS)", "root mean square of the state after each block", lambda p: p.rms,
                 verdict="forward", log=True, main=True),
    ProfilePanel("grad_h", "Gradient of the state", "norm of ∂loss/∂h at each boundary", lambda p: p.grad_h,
                 verdict="backward", log=True, main=True),
    ProfilePanel("cos", "Token cosine", "mean cosine of two tokens of a sequence", lambda p: p.cos,
                 limits=("cosine",), verdict="collapse", span=(0.0, 1.0), main=True),
    ProfilePanel("ang", "Turn per block (rad)", "angle by which a block turns a token", lambda p: p.ang,
                 limits=("dead_angle",), verdict="dead depth", main=True),
    ProfilePanel("gain", "Gradient gain per block", "gradient below a block over that above it", lambda p: p.gain,
                 verdict="backward", log=True),
    ProfilePanel("branch_ratio", "Increment over state", "RMS of what a block adds, over that of the state",
                 lambda p: p.branch_ratio, verdict="uneven", log=True),
    ProfilePanel("align", "Alignment", "cosine of increment and state: 0 grows like √l, 1 like l", lambda p: p.align),
    ProfilePanel("erank", "Effective rank", "how many directions the tokens of a sequence span", lambda p: p.erank,
                 limits=("rank",), verdict="collapse"),
    ProfilePanel("upd_ratio", "Update over weight", "change of a block's weights in one step", lambda p: p.upd_ratio,
                 limits=("update_low", "update_high"), verdict="update ratio", log=True),
    ProfilePanel("grad_w", "Gradient of the weights", "norm over each block's parameters", lambda p: p.grad_w,
                 log=True),
    ProfilePanel("attn_entropy", "Attention entropy", "of a row, over the log of its visible keys",
                 lambda p: p.attn_entropy, verdict="attention"),
    ProfilePanel("logit_max", "Largest attention score", "before the softmax", lambda p: p.logit_max,
                 limits=("logit_warn", "logit_fail"), verdict="attention logits"),
    ProfilePanel("sink", "Mass on the first key", "share of attention", lambda p: p.sink),
    ProfilePanel("absorb_bf16", "Lost in bf16", "share of increments below half a unit of the state's last place",
                 lambda p: p.absorb_bf16, limits=("absorb_warn", "absorb_fail"), verdict="bf16 absorption"),
    ProfilePanel("headroom", "Headroom in fp16 (bits)", "distance of the largest entry to 65504",
                 lambda p: p.headroom("fp16"), limits=("headroom_bits",), verdict="headroom"),
    ProfilePanel("outlier_ratio", "Largest entry over RMS", "outliers", lambda p: p.outlier_ratio,
                 limits=("outlier_ratio",), verdict="outliers", log=True),
    ProfilePanel("kurtosis", "Kurtosis", "3 for a Gaussian", lambda p: p.kurtosis, log=True),
    ProfilePanel("mean_abs", "Mean magnitude", "mean |h|", lambda p: p.mean_abs, log=True),
    ProfilePanel("var_entry", "Variance over entries", "of a token, mean over tokens", lambda p: p.var_entry, log=True),
    ProfilePanel("var_data", "Variance over tokens", "of an entry, mean over entries", lambda p: p.var_data, log=True),
)  # fmt: skip
"""In reading order."""


def measured(profiles: list[Profile]) -> list[ProfilePanel]:
    """The panels for which there are values."""
    return [p for p in PANELS if any(x is not None for profile in profiles for x in p.read(profile))]
