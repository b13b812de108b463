"""Measures of hidden states at a block boundary and over a block: RMS, variance, cosines, angles, ranks, outliers.

Functions of states (..., T, D), tensors or `HiddenState`s, that return 0-dimensional tensors on the same device, so
that the caller can stack all results and copy them once. What is not finite is left out, entry by entry or, where a
token counts as a whole, token by token; `broken` is the share of it. Where nothing is left the result is NaN.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.probes.hidden_state import HiddenState, nonzero, spaced

SAMPLE = 256
"""Largest number of tokens of a Gram matrix."""

OUTLIER = 6.0
"""An outlier channel has an entry larger than this many RMS."""

_BF16_BITS = 8
"""Bits of a bf16 significand, the leading one included: half a unit in the last place of h ≥ 2^e is 2^(e - 8)."""

Like = Tensor | HiddenState


def boundary(h: Like) -> dict[str, Tensor]:
    """All scalar measures of one state except its ranks, by their names in `Profile`."""
    h = HiddenState.of(h)
    apart = _apart(h)
    return {
        "rms": rms(h),
        "mean_abs": mean_abs(h),
        "max_abs": max_abs(h),
        "var_entry": var_entry(h),
        "var_data": var_data(h),
        "broken": broken(h),
        "cos": _cosine(*apart),
        "cos_rest": rest_cosine(h),
        "dist_to_mean": _distance(*apart),
        "kurtosis": kurtosis(h),
    }


def boundary_with_channels(h: Like) -> dict[str, Tensor]:
    """The same with the outlier channels."""
    h = HiddenState.of(h)
    return {**boundary(h), "top_channels": top_channels(h)}


def boundary_with_ranks(h: Like) -> dict[str, Tensor]:
    """The same with the Gram matrices from which ranks are computed (see `gram`)."""
    h = HiddenState.of(h)
    return {**boundary_with_channels(h), "gram": gram(h), "rest_gram": gram(h.rest)}


def block(h: Like, h_next: Like) -> dict[str, Tensor]:
    """All measures of one block that follow from the state before and after it, by their names in `Profile`."""
    h, h_next = HiddenState.of(h), HiddenState.of(h_next)
    step = increment(h, h_next)
    angles = _angles(h, h_next)
    return {
        "branch_rms": rms(step),
        "align": align(h, step),
        "ang": _mean(*angles),
        "block_influence": _influence(*angles),
        "absorb_bf16": absorb_bf16(h, step),
    }


def size_and_cosine(h: Like) -> dict[str, Tensor]:
    """The cheap measures of one state: training profiles record no others."""
    h = HiddenState.of(h)
    return {"rms": rms(h), "broken": broken(h), "cos": token_cosine(h)}


def size_and_cosine_with_rank(h: Like) -> dict[str, Tensor]:
    """The same with the Gram matrix from which ranks are computed."""
    h = HiddenState.of(h)
    return {**size_and_cosine(h), "gram": gram(h)}


def size_and_angle(h: Like, h_next: Like) -> dict[str, Tensor]:
    """The cheap measures of one block."""
    return {"branch_rms": rms(increment(h, h_next)), "ang": ang(h, h_next)}


class MeasureSet(NamedTuple):
    """The measures taken of a stack of blocks."""

    boundary: Callable[[Like], dict[str, Tensor]]
    """Measures of the state at a block boundary."""
    ranked_boundary: Callable[[Like], dict[str, Tensor]]
    """The same with ranks."""
    block: Callable[[Like, Like], dict[str, Tensor]]
    """Measures of the states before and after a block."""
    all_entries: bool
    """Whether the extremes of all entries are recorded as well; the measures use a sample of tokens."""
    state_gradient: bool
    """Whether the gradient is that of the whole state, where a scheme's state holds more than the hidden state."""


def gradient(g: Like) -> dict[str, Tensor]:
    """All measures of the gradient of one state, by their names in `Profile`."""
    g = HiddenState.of(g)
    return {"grad_h": _length(g), "grad_broken": broken(g)}


FULL = MeasureSet(boundary_with_channels, boundary_with_ranks, block, all_entries=True, state_gradient=False)
"""Every measure: probes and checks."""

CHEAP = MeasureSet(size_and_cosine, size_and_cosine_with_rank, size_and_angle, all_entries=False, state_gradient=True)
"""A few measures: the profiles of a training run."""


def extremes(x: Tensor) -> Tensor:
    """(2,) smallest and largest entry, both NaN if any entry is; reads the tensor once, without a copy."""
    return torch.stack(torch.aminmax(x.detach())) if x.numel() else x.new_zeros(2)


def broken(h: Like) -> Tensor:
    """Share of entries that are NaN or infinite; 0 for a state without entries."""
    h = HiddenState.of(h)
    return h.bad.sum() / max(h.raw.numel(), 1)


def rms(h: Like) -> Tensor:
    """√mean h²."""
    h = HiddenState.of(h)
    return h.scale * (h.squares.sum() / h.count).sqrt()


def norm(*tensors: Tensor) -> Tensor:
    """√Σ h² over all entries of all tensors, in fp64: squares of fp32 overflow above 2·10¹⁹."""
    if not tensors:
        raise NormLabError("norm: expected at least one tensor, got none")
    parts = [_length(HiddenState(tensor.reshape(1, -1))) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))


def mean_abs(h: Like) -> Tensor:
    """Mean of |h|."""
    h = HiddenState.of(h)
    return h.scale * (h.scaled.abs().sum() / h.count)


def max_abs(h: Like) -> Tensor:
    """max |h|."""
    h = HiddenState.of(h)
    return torch.where(h.count > 0, h.scale, torch.nan)


def var_entry(h: Like) -> Tensor:
    """Variance over the entries of a token, mean over tokens."""
    h = HiddenState.of(h)
    spread = (h.scaled - h.scaled.mean(-1, keepdim=True)).square().mean(-1)
    return _mean(spread, h.whole) * h.scale * h.scale


def var_data(h: Like) -> Tensor:
    """Variance of an entry over tokens, mean over entries."""
    h = HiddenState.of(h)
    return _mean(h.rest.raw.reshape(h.tokens.shape).square().mean(-1), h.whole) * h.scale * h.scale


def kurtosis(h: Like) -> Tensor:
    """mean h⁴ / (mean h²)²: 3 for a Gaussian, D for states with one channel."""
    h = HiddenState.of(h)
    fourth, second = h.squares.square().sum(), h.squares.sum()
    return torch.where(h.count > 0, _ratio(fourth * h.count, second.square()), torch.nan)


def outlier_ratio(h: Like) -> Tensor:
    """max |h| / RMS: at most √(T D)."""
    h = HiddenState.of(h)
    return _ratio(max_abs(h), rms(h))


def top_channels(h: Like, count: int = 8) -> Tensor:
    """Indices of the at most `count` channels with the largest entries above 6 RMS, largest first, padded with -1.

    The size is fixed, so that it fits into the ledger.
    """
    x = HiddenState.of(h).scaled
    peaks = x.abs().amax(0) if x.numel() else x.new_zeros(x.shape[-1])
    values, channels = peaks.topk(min(count, peaks.numel()))
    found = torch.where(values * HiddenState.of(h).scale > OUTLIER * rms(h), channels, -1)
    return torch.nn.functional.pad(found, (0, count - found.numel()), value=-1)


def token_cosine(h: Like) -> Tensor:
    """Mean cosine of two tokens of the same sequence.

    Tokens without a direction do not count; NaN where no sequence has two others.
    """
    return _cosine(*_apart(HiddenState.of(h)))


def rest_cosine(h: Like) -> Tensor:
    """The same after the mean of all tokens, of all sequences, has been subtracted.

    NaN with one sequence, whose mean is that of all: its tokens point away from one another, whatever they are.
    """
    apart, counts = _apart(HiddenState.of(h).rest)
    return torch.where((counts >= 2).sum() > 1, _cosine(apart, counts), torch.nan)


def dist_to_mean(h: Like) -> Tensor:
    """Mean ‖θ - θ̄‖² over the unit tokens θ of a sequence; 0 when all tokens point the same way, at most 1."""
    return _distance(*_apart(HiddenState.of(h)))


def gram(h: Like, most: int = SAMPLE) -> Tensor:
    """Products of at most `most` tokens, evenly spaced over all sequences, with one another, in units of max|h|².

    Of channels where there are fewer of these: the two matrices' spectra differ by zeros alone.
    """
    h = HiddenState.of(h)
    x = h.tokens
    if x.numel() == 0:
        return x.new_full((1, 1), torch.nan)
    x = x if len(x) <= most else x[spaced(len(x), most, x.device)]
    with torch.autocast(x.device.type, enabled=False):
        products = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    # Nothing left is not the same as a state of rank zero.
    return torch.where(h.wholes > 0, products, torch.nan)


def ranks(products: Tensor) -> tuple[float, float]:
    """(effective rank, stable rank) of a Gram matrix; NaN for one that is not finite, which solvers refuse."""
    if not products.isfinite().all():
        return torch.nan, torch.nan
    spectrum = torch.linalg.eigvalsh(products).clamp(min=0.0)
    return float(effective_rank(spectrum)), float(stable_rank(spectrum))


def effective_rank(spectrum: Tensor) -> Tensor:
    """exp(-Σ p log p) of the normalised spectrum p, with 0 log 0 = 0; 0 for a zero matrix."""
    total = spectrum.sum()
    share = spectrum / nonzero(total)
    return torch.where(total == 0, 0.0, torch.special.entr(share).sum().exp())


def stable_rank(spectrum: Tensor) -> Tensor:
    """‖H‖²_F / ‖H‖²₂: at most the rank; 0 for a zero matrix."""
    return _ratio(spectrum.sum(), spectrum.amax())


def increment(h: Like, h_next: Like) -> HiddenState:
    """h_next - h, in fp32 at least."""
    h, h_next = HiddenState.of(h), HiddenState.of(h_next)
    if h.raw.shape != h_next.raw.shape:
        shapes = f"{tuple(h.raw.shape)} and {tuple(h_next.raw.shape)}"
        raise NormLabError(f"increment: states must have one shape, got {shapes}")
    return HiddenState(h_next.raw - h.raw)


def align(h: Like, step: Like) -> Tensor:
    """Mean cosine of a token and its increment; 0 where either is zero."""
    h, step = HiddenState.of(h), HiddenState.of(step)
    return _mean((h.directions * step.directions).sum(-1), h.whole * step.whole)


def ang(h: Like, h_next: Like) -> Tensor:
    """Mean angle in radians between a token before and after the block; a zero token is not turned."""
    return _mean(*_angles(HiddenState.of(h), HiddenState.of(h_next)))


def block_influence(h: Like, h_next: Like) -> Tensor:
    """Mean of 1 - cos of that angle."""
    return _influence(*_angles(HiddenState.of(h), HiddenState.of(h_next)))


def absorb_bf16(h: Like, step: Like) -> Tensor:
    """Share of coordinates whose increment is below half a unit in the last place of a bf16 state.

    Coordinates without increment count as well, for in a bf16 model that is what a lost increment looks like. Tokens
    without any increment do not: a block that adds nothing loses nothing.
    """
    h, step = HiddenState.of(h), HiddenState.of(step)
    whole = h.whole * step.whole
    moved = whole * step.present
    # Huge states are made smaller, which changes no digit, since what follows multiplies them with 2^23.
    factor = torch.where(h.scale > 2.0**90, 2.0**-40, 1.0).float()
    power = power_of_two(h.clean.float() * factor)
    # On the increment's side 2^8 times as large, so that no threshold is too small for fp32.
    lost = (step.clean.float().abs() * factor * 2**_BF16_BITS < power).reshape(h.scaled.shape).float().mean(-1)
    return torch.where((moved.sum() > 0) | (whole.sum() == 0), _mean(lost, moved), 0.0)


def power_of_two(x: Tensor) -> Tensor:
    """2^⌊log₂|x|⌋ for |x| below 2^104 in fp32, 0 for 0, of roundings alone (Rump, Ogita and Oishi 2008).

    Reading the bits of the exponent would be faster, but vmap has no such views.
    """
    large = (2.0**23 + 1) * x
    return (large - (1 - 2.0**-24) * large).abs()


def wide(x: Tensor) -> torch.dtype:
    """The widest floating-point type of a tensor's device."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _length(h: HiddenState) -> Tensor:
    return torch.where(h.count > 0, torch.linalg.vector_norm(h.clean, dtype=wide(h.clean)), torch.nan)


def _apart(h: HiddenState) -> tuple[Tensor, Tensor]:
    """For each sequence Σ‖θ - θ̄‖² over its unit tokens, and how many these are."""
    units, present = h.sequences(h.directions), h.sequences(h.present)
    counts = present.sum(-1)
    centre = units.sum(-2, keepdim=True) / counts.clamp(min=1)[:, None, None]
    return ((units - centre).square().sum(-1) * present).sum(-1), counts


def _distance(apart: Tensor, counts: Tensor) -> Tensor:
    return _mean(apart / counts.clamp(min=1), (counts >= 1).to(counts.dtype))


def _cosine(apart: Tensor, counts: Tensor) -> Tensor:
    """Σ‖θ - θ̄‖² = n - ‖Σθ‖²/n, and the cosines of all pairs add up to ‖Σθ‖² - n: no T x T matrix."""
    return _mean(1 - apart / (counts - 1).clamp(min=1), (counts >= 2).to(counts.dtype))


def _angles(h: HiddenState, h_next: HiddenState) -> tuple[Tensor, Tensor]:
    """(2 atan2(‖u - v‖, ‖u + v‖) of unit tokens u and v, which is exact at small angles; mask of valid tokens)."""
    apart, together = ((h.directions - s * h_next.directions).square().sum(-1).sqrt() for s in (1, -1))
    turned = h.present * h_next.present
    return 2 * torch.atan2(apart, together) * turned, h.whole * h_next.whole


def _influence(angles: Tensor, counted: Tensor) -> Tensor:
    # 1 - cos itself has no digits left at small angles.
    return _mean(2 * (angles / 2).sin().square(), counted)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """over / under, with 0 / 0 = 0: a zero state has no outliers and no rank."""
    return torch.where((over == 0) & (under == 0), 0.0, over / under)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the finite values whose mask is 1; NaN if there are none."""
    return (values * counted).sum() / counted.sum()
