"""A `Profile`: everything measured in one stack of blocks at one step, in plain numbers.

Boundary 0 is the state that enters the first block, boundary l the state after l blocks; block l lies between the
boundaries l and l + 1. A number that was not measured is None. So is one that is not finite, which `unfit` remembers:
JSON has no NaN, and a model that has blown up must still give a report.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from normlab.errors import NormLabError, unknown

Number = float | None
Series = list[Number]
When = Literal["before", "after"]
"""The two snapshots of a model: before its training burst and after it."""

Format = Literal["fp16", "bf16", "e4m3", "e5m2"]
LARGEST: dict[Format, float] = {
    "fp16": 65504.0,
    "bf16": float.fromhex("0x1.fep127"),
    "e4m3": 448.0,
    "e5m2": 57344.0,
}
"""The largest finite number of each format."""

LOW_ENTROPY = 0.05
"""An attention head whose normalised entropy is below this looks at one key."""

BOUNDARY = (
    "rms",
    "mean_abs",
    "max_abs",
    "var_entry",
    "var_data",
    "broken",
    "grad_h",
    "grad_broken",
    "cos",
    "cos_rest",
    "dist_to_mean",
    "erank",
    "erank_rest",
    "stable_rank",
    "outlier_ratio",
    "kurtosis",
)
"""Fields with one number for each boundary."""

BLOCK = (
    "branch_rms",
    "branch_ratio",
    "align",
    "ang",
    "block_influence",
    "absorb_bf16",
    "grad_w",
    "upd_ratio",
    "attn_entropy",
    "attn_entropy_low_share",
    "logit_max",
    "sink",
    "theta_p",
)
"""Fields with one number for each block."""

SCALAR = ("loss", "logits_rms", "logsumexp")
"""Fields with one number."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One snapshot of a stack. Series may be left out; numbers that are not finite may be given as they are."""

    boundaries: int
    """Blocks plus one."""

    step: int = 0
    """Optimiser steps before this snapshot."""
    seed: int = 0
    """Seed of the measured run."""

    rms: Series = field(default_factory=list)
    """√mean h² over all tokens and entries."""
    mean_abs: Series = field(default_factory=list)
    """mean |h|."""
    max_abs: Series = field(default_factory=list)
    """max |h|."""
    var_entry: Series = field(default_factory=list)
    """Variance over the entries of a token, mean over tokens."""
    var_data: Series = field(default_factory=list)
    """Variance of an entry over tokens, mean over entries."""
    broken: Series = field(default_factory=list)
    """Share of the entries of h that are NaN or infinite; all other measures leave these out."""
    grad_h: Series = field(default_factory=list)
    """‖∂loss/∂h‖."""
    grad_broken: Series = field(default_factory=list)
    """Share of the entries of ∂loss/∂h that are NaN or infinite."""
    cos: Series = field(default_factory=list)
    """Mean cosine of two tokens of a sequence."""
    cos_rest: Series = field(default_factory=list)
    """The same without the mean of all tokens of the batch; None with one sequence, or where nothing else is left."""
    dist_to_mean: Series = field(default_factory=list)
    """Mean ‖θ - θ̄‖² of the unit tokens θ of a sequence."""
    erank: Series = field(default_factory=list)
    """exp(entropy of the normalised Gram spectrum)."""
    erank_rest: Series = field(default_factory=list)
    """The same without the mean of all tokens of the batch."""
    stable_rank: Series = field(default_factory=list)
    """‖H‖²_F / ‖H‖²₂."""
    outlier_ratio: Series = field(default_factory=list)
    """max |h| / RMS."""
    kurtosis: Series = field(default_factory=list)
    """mean h⁴ / (mean h²)²: 3 for a Gaussian."""
    top_channels: list[list[int]] = field(default_factory=list)
    """Channels with an entry above 6 RMS, for each boundary."""

    branch_rms: Series = field(default_factory=list)
    """RMS of the increment that a block adds."""
    branch_ratio: Series = field(default_factory=list)
    """The same, divided by the RMS of the state that it is added to."""
    align: Series = field(default_factory=list)
    """Mean cosine of increment and state: 0 lets the state grow like √l, 1 like l."""
    ang: Series = field(default_factory=list)
    """Mean angle in radians by which a block turns a token."""
    block_influence: Series = field(default_factory=list)
    """1 − mean cosine of a token before and after the block."""
    absorb_bf16: Series = field(default_factory=list)
    """Share of coordinates whose increment a bf16 state would round away."""
    grad_w: Series = field(default_factory=list)
    """Gradient norm of a block's parameters."""
    upd_ratio: Series = field(default_factory=list)
    """‖Δw‖ / ‖w‖ of a block's parameters in one optimiser step."""
    attn_entropy: Series = field(default_factory=list)
    """Entropy of an attention row over the log of its visible keys, mean over rows and heads."""
    attn_entropy_low_share: Series = field(default_factory=list)
    """Share of the heads whose mean entropy is below 0.05."""
    logit_max: Series = field(default_factory=list)
    """Largest attention score."""
    sink: Series = field(default_factory=list)
    """Attention mass on the first key."""
    theta_p: Series = field(default_factory=list)
    """Balanced mass of an attention row: 1 if its keys split into two halves of equal weight, 0 if one has it all."""
    attn_heads: list[Series] = field(default_factory=list)
    """Entropy of every head of each block, as in attn_entropy."""
    weight_rms: dict[str, Series] = field(default_factory=dict)
    """For each matrix, by its path inside a block, √mean w² in every block before the step; None where it has none."""

    loss: Number = None
    """Nats per token."""
    logits_rms: Number = None
    """√mean of the squared output logits."""
    logsumexp: Number = None
    """Mean of log Σ exp(logits)."""

    nan_first: str | None = None
    """The first module whose output was not finite, and the step."""
    unfit: dict[str, list[int]] = field(default_factory=dict)
    """Field to the positions whose number was not finite and became None (position 0 for a scalar)."""

    def __post_init__(self) -> None:
        if self.boundaries < 2:
            raise NormLabError(f"profile: a stack has at least one block and two boundaries, got {self.boundaries}")
        unfit = {name: list(places) for name, places in self.unfit.items()}
        for name in BOUNDARY:
            self._set_series(name, self.boundaries, unfit)
        for name in BLOCK:
            self._set_series(name, self.depth, unfit)
        for name in SCALAR:
            value = getattr(self, name)
            object.__setattr__(self, name, _finite([value], name, unfit)[0])
        object.__setattr__(self, "unfit", unfit)
        channels = self.top_channels or [[] for _ in range(self.boundaries)]
        _check_length("top_channels", channels, self.boundaries)
        object.__setattr__(self, "top_channels", channels)
        heads = self.attn_heads or [[] for _ in range(self.depth)]
        _check_length("attn_heads", heads, self.depth)
        object.__setattr__(self, "attn_heads", [_finite(row, "", {}) for row in heads])
        weights = {path: _finite(sizes, "", {}) for path, sizes in self.weight_rms.items()}
        for path, sizes in weights.items():
            _check_length(f"weight_rms of {path}", sizes, self.depth)
        object.__setattr__(self, "weight_rms", weights)

    def _set_series(self, name: str, length: int, unfit: dict[str, list[int]]) -> None:
        series = getattr(self, name) or [None] * length
        _check_length(name, series, length)
        object.__setattr__(self, name, _finite(series, name, unfit))

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.boundaries - 1

    @property
    def when(self) -> When:
        """before (at step 0) or after the training steps."""
        return "before" if self.step == 0 else "after"

    @property
    def gain(self) -> Series:
        """χ_l = ‖g_l‖ / ‖g_{l+1}‖ of each block: what it does to the gradient on its way back."""
        return [ratio(first, second) for first, second in pairwise(self.grad_h)]

    @property
    def growth(self) -> Series:
        """RMS(h_{l+1}) / RMS(h_l) of each block."""
        return [ratio(second, first) for first, second in pairwise(self.rms)]

    @property
    def spread(self) -> Series:
        """How far tokens lie from the mean of all, as a share of the RMS."""
        pairs = zip(self.var_data, self.rms, strict=True)
        return [None if variance is None else ratio(math.sqrt(variance), size) for variance, size in pairs]

    @property
    def G(self) -> Number:  # noqa: N802 (the symbol that everybody uses)
        """‖g_1‖ / ‖g_L‖: what the stack after its first block does to the gradient.

        The first block is left out: the gradient of small embeddings is large for a reason that is not depth.
        """
        return ratio(self.grad_h[1], self.grad_h[-1])

    @property
    def first_broken(self) -> int | None:
        """The first boundary whose state holds a value that is not finite."""
        marks = [share is not None and share > 0.0 for share in self.broken]
        marked = [place for place, mark in enumerate(marks) if mark] + self.unfit.get("rms", [])
        return min(marked, default=None)

    @property
    def gradient_broken(self) -> bool:
        """Whether a gradient of the state holds a value that is not finite."""
        return "grad_h" in self.unfit or any(share is not None and share > 0.0 for share in self.grad_broken)

    def headroom(self, format: Format) -> Series:  # noqa: A002 (number format: its name everywhere)
        """log₂ of how much larger the state may become, at each boundary, before it overflows `format`."""
        if format not in get_args(Format):
            raise unknown("number format", str(format), get_args(Format))
        return [_bits(LARGEST[format], size) for size in self.max_abs]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Profile:
        """The profile that `to_dict` wrote."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in record:
            if name not in known:
                raise unknown("field of a profile", name, known)
        if "boundaries" not in record:
            raise NormLabError("profile: the record has no 'boundaries'; expected what Profile.to_dict writes")
        return cls(**record)


def ratio(over: Number, under: Number) -> Number:
    """over / under; None if either is missing or the divisor is zero."""
    if over is None or under is None or under == 0.0:
        return None
    return over / under


def _bits(largest: float, size: Number) -> Number:
    if size is None:
        return None
    return math.log2(largest) - math.log2(size) if size > 0.0 else math.inf


def _check_length(name: str, series: Sequence[Any], length: int) -> None:
    if len(series) != length:
        raise NormLabError(f"profile: {name} must have {length} entries, got {len(series)}")


def _finite(series: Sequence[Number], name: str, unfit: dict[str, list[int]]) -> Series:
    """The series as finite floats; None for the others, whose positions are added to `unfit`."""
    bad = [place for place, value in enumerate(series) if value is not None and not math.isfinite(value)]
    if bad:
        unfit[name] = sorted({*bad, *unfit.get(name, [])})
    return [None if value is None or place in bad else float(value) for place, value in enumerate(series)]
