"""What is measured at a block boundary and over a block: functions of tensors that answer with 0-dimensional tensors.

A state h has tokens in its last but one dimension and channels in its last: (..., T, D). Everything stays on the
device, so that whoever measures can stack all answers and transfer them once.

- Half precision is widened before anything is squared, and sums of squares are taken of h / max|h|: squares of fp16
  overflow above 255, and those of fp32 above 2·10¹⁹.
- Entries that are NaN or infinite are left out, tokens that hold one are left out where a token counts as a whole;
  `broken` says how many entries that were. Where nothing is left the answer is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normlab import geometry
from normlab.errors import NormLabError
from normlab.norms import widen

SAMPLE = 256
"""Most tokens that a Gram matrix is made of."""

OUTLIER = 6.0
"""A channel stands out when one of its entries is larger than this many RMS."""

_BF16_BITS = 8
"""Bits of a bf16 significand, the leading one included: half a unit in the last place of h ≥ 2^e is 2^(e - 8)."""

_EXPONENT = 0x7F800000
"""The exponent's bits of an fp32 number: with all others zero they read 2^e."""


def boundary(h: Tensor) -> dict[str, Tensor]:
    """All measures of one state, by their names in `Profile`."""
    size, largest, spectrum = rms(h), max_abs(h), gram_spectrum(h)
    return {
        "rms": size,
        "mean_abs": mean_abs(h),
        "max_abs": largest,
        "var_entry": var_entry(h),
        "var_data": var_data(h),
        "broken": broken(h),
        "cos": token_cosine(h),
        "dist_to_mean": dist_to_mean(h),
        "erank": effective_rank(spectrum),
        "stable_rank": stable_rank(spectrum),
        "outlier_ratio": _ratio(largest, size),
        "kurtosis": kurtosis(h),
    }


def block(h: Tensor, h_next: Tensor) -> dict[str, Tensor]:
    """All measures of one block that follow from the state before and after it, by their names in `Profile`."""
    step = increment(h, h_next)
    size = rms(step)
    return {
        "branch_rms": size,
        "branch_ratio": _ratio(size, rms(h)),
        "align": align(h, step),
        "ang": ang(h, h_next),
        "block_influence": block_influence(h, h_next),
        "absorb_bf16": absorb_bf16(h, step),
    }


def gradient(g: Tensor) -> dict[str, Tensor]:
    """All measures of the gradient of one state, by their names in `Profile`."""
    return {"grad_h": norm(g), "grad_broken": broken(g)}


def broken(h: Tensor) -> Tensor:
    """Share of entries that are NaN or infinite; 0 for a state without entries."""
    return _ratio((~h.isfinite()).sum(), torch.full((), h.numel(), device=h.device))


def rms(h: Tensor) -> Tensor:
    """√mean h²."""
    scale, scaled, count = _scaled(h)
    return scale * (scaled.square().sum() / count).sqrt()


def norm(*tensors: Tensor) -> Tensor:
    """√Σ h² over all entries of all tensors, as m ‖h / m‖ with m = max|h|."""
    if not tensors:
        raise NormLabError("norm: expected at least one tensor, got none")
    parts = torch.stack([_length(tensor) for tensor in tensors])
    return _length(parts)


def mean_abs(h: Tensor) -> Tensor:
    """Mean of |h|."""
    scale, scaled, count = _scaled(h)
    return scale * (scaled.abs().sum() / count)


def max_abs(h: Tensor) -> Tensor:
    """max |h|."""
    scale, _, count = _scaled(h)
    return torch.where(count > 0, scale, torch.nan)


def var_entry(h: Tensor) -> Tensor:
    """Variance over the entries of a token, mean over tokens."""
    scale, x, whole = _scaled_tokens(h)
    spread = (x - x.mean(-1, keepdim=True)).square().mean(-1)
    return _mean(spread, whole) * scale * scale


def var_data(h: Tensor) -> Tensor:
    """Variance of an entry over tokens, mean over entries."""
    scale, x, whole = _scaled_tokens(h)
    centre = x.sum(0) / whole.sum()
    apart = torch.where(whole[:, None], x - centre, 0.0)
    return apart.square().sum(0).mean() / whole.sum() * scale * scale


def kurtosis(h: Tensor) -> Tensor:
    """mean h⁴ / (mean h²)²: 3 for a Gaussian, D for states with one channel."""
    _, scaled, count = _scaled(h)
    square = scaled.square()
    return torch.where(count > 0, _ratio(square.square().sum() * count, square.sum().square()), torch.nan)


def outlier_ratio(h: Tensor) -> Tensor:
    """max |h| / RMS: at most √(T D)."""
    return _ratio(max_abs(h), rms(h))


def top_channels(h: Tensor, count: int = 8) -> Tensor:
    """Indices of the at most `count` channels with the largest entries above 6 RMS, largest first, padded with -1.

    A fixed size, so that it can travel with the numbers.
    """
    x, _ = _finite(h)
    peaks = x.abs().reshape(-1, x.shape[-1]).amax(0) if x.numel() else x.new_zeros(x.shape[-1])
    values, channels = peaks.topk(min(count, peaks.numel()))
    found = torch.where(values > OUTLIER * rms(h), channels, -1)
    return torch.nn.functional.pad(found, (0, count - found.numel()), value=-1)


def token_cosine(h: Tensor) -> Tensor:
    """Mean cosine of two tokens of the same sequence, as (‖Σu‖² - n) / (n (n - 1)): no T x T matrix.

    Tokens without a direction do not count; NaN where no sequence has two others.
    """
    directions, counts = _directions(h)
    enough = counts >= 2
    pairs = torch.where(enough, counts * (counts - 1), 1.0)
    cosines = (directions.sum(-2).square().sum(-1) - counts) / pairs
    return _mean(cosines, enough)


def dist_to_mean(h: Tensor) -> Tensor:
    """Mean ‖θ - θ̄‖² over the unit tokens θ of a sequence; 0 when all tokens point the same way, at most 1."""
    directions, counts = _directions(h)
    present = directions.square().sum(-1, keepdim=True) > 0
    centre = directions.sum(-2, keepdim=True) / counts.clamp(min=1)[..., None, None]
    apart = torch.where(present, directions - centre, 0.0).square().sum((-2, -1))
    return _mean(apart / counts.clamp(min=1), counts >= 1)


def gram_spectrum(h: Tensor, *, sample: int = SAMPLE, generator: torch.Generator | None = None) -> Tensor:
    """Eigenvalues of the Gram matrix of at most `sample` tokens, ascending, in units of max|h|².

    The tokens are evenly spaced over all sequences, or drawn with `generator`.
    """
    _, x, whole = _scaled_tokens(h)
    if x.numel() == 0:
        return x.new_full((1,), torch.nan)
    x = x[_chosen(len(x), sample, generator, x.device)]
    # The smaller of the two products: their spectra differ by zeros alone.
    gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    spectrum = torch.linalg.eigvalsh(gram).clamp(min=0.0)
    # Nothing left is not the same as a state of rank zero.
    return torch.where(whole.any(), spectrum, torch.nan)


def effective_rank(spectrum: Tensor) -> Tensor:
    """exp(-Σ p log p) of the normalised spectrum p, with 0 log 0 = 0; 0 for a zero matrix."""
    total = spectrum.sum()
    share = spectrum / _nonzero(total)
    return torch.where(total == 0, 0.0, torch.special.entr(share).sum().exp())


def stable_rank(spectrum: Tensor) -> Tensor:
    """‖H‖²_F / ‖H‖²₂: at most the rank; 0 for a zero matrix."""
    return _ratio(spectrum.sum(), spectrum.amax())


def increment(h: Tensor, h_next: Tensor) -> Tensor:
    """h_next - h, in fp32 at least."""
    if h.shape != h_next.shape:
        raise NormLabError(f"increment: states must have one shape, got {tuple(h.shape)} and {tuple(h_next.shape)}")
    return widen(h_next) - widen(h)


def align(h: Tensor, step: Tensor) -> Tensor:
    """Mean cosine of a token and its increment; 0 where either is zero."""
    (x, whole), (y, whole_too) = _tokens(h), _tokens(step)
    return _mean((geometry.unit(x) * geometry.unit(y)).sum(-1), whole & whole_too)


def ang(h: Tensor, h_next: Tensor) -> Tensor:
    """Mean angle in radians between a token before and after the block; a zero token is not turned."""
    return _mean(*_angles(h, h_next))


def block_influence(h: Tensor, h_next: Tensor) -> Tensor:
    """Mean of 1 - cos of that angle, as 2 sin²(θ/2): 1 - cos itself has no digits left at small angles."""
    angles, whole = _angles(h, h_next)
    return _mean(2 * (angles / 2).sin().square(), whole)


def absorb_bf16(h: Tensor, step: Tensor) -> Tensor:
    """Share of coordinates whose increment is below half a unit in the last place of a bf16 state.

    Coordinates without increment count as well, for in a bf16 model that is what a lost increment looks like. Tokens
    without any increment do not: a block that adds nothing loses nothing.
    """
    (x, whole), (y, whole_too) = _tokens(h), _tokens(step)
    moved = whole & whole_too & (y != 0).any(-1)
    power = (x.float().view(torch.int32) & _EXPONENT).view(torch.float32)
    # On the increment's side 2^8 times as large, so that no threshold is too small for fp32.
    lost = (y.float().abs() * 2**_BF16_BITS < power).float().mean(-1)
    return torch.where(moved.any() | ~(whole & whole_too).any(), _mean(lost, moved), 0.0)


def _nonzero(x: Tensor) -> Tensor:
    """A divisor: 1 in place of 0."""
    return torch.where(x == 0, 1.0, x)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """over / under, and 0 / 0 = 0: a state that is zero has no outliers and no rank."""
    return torch.where((over == 0) & (under == 0), 0.0, over / under)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the values that count; NaN if none does."""
    return torch.where(counted, values, 0.0).sum() / counted.sum()


def _finite(h: Tensor) -> tuple[Tensor, Tensor]:
    """The state in fp32 at least, zero where it is not finite, and where it is."""
    fine = h.isfinite()
    return torch.where(fine, widen(h.detach()), 0.0), fine


def _scaled(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max|h|, h divided by it and the number of entries, all of the finite part."""
    x, fine = _finite(h)
    scale = x.abs().amax() if x.numel() else x.new_zeros(())
    return scale, x / _nonzero(scale), fine.sum()


def _length(h: Tensor) -> Tensor:
    scale, scaled, count = _scaled(h)
    return torch.where(count > 0, scale * scaled.square().sum().sqrt(), torch.nan)


def _tokens(h: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, D), zero where not finite, and which tokens are finite as a whole."""
    if h.ndim < 2:
        raise NormLabError(f"measures: expected a state of shape (..., tokens, width), got {tuple(h.shape)}")
    x, fine = _finite(h)
    return x.reshape(-1, h.shape[-1]), fine.reshape(-1, h.shape[-1]).all(-1)


def _scaled_tokens(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max|h| of the tokens that are whole, the tokens divided by it (zero for the others), and which are whole."""
    x, whole = _tokens(h)
    x = torch.where(whole[:, None], x, 0.0)
    scale = x.abs().amax() if x.numel() else x.new_zeros(())
    return scale, x / _nonzero(scale), whole


def _directions(h: Tensor) -> tuple[Tensor, Tensor]:
    """Unit tokens (..., T, D), zero for those without a direction, and how many have one in each sequence."""
    tokens, whole = _tokens(h)
    units = torch.where(whole[:, None], geometry.unit(tokens), 0.0).reshape(h.shape)
    return units, (units != 0).any(-1).sum(-1).to(units.dtype)


def _angles(h: Tensor, h_next: Tensor) -> tuple[Tensor, Tensor]:
    (x, whole), (y, whole_too) = _tokens(h), _tokens(h_next)
    return geometry.angle(x, y), whole & whole_too


def _chosen(tokens: int, sample: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Which tokens to take: all, evenly spaced ones, or random ones."""
    if tokens <= sample:
        return torch.arange(tokens, device=device)
    if generator is not None:
        return torch.randperm(tokens, generator=generator, device=generator.device)[:sample].to(device)
    return torch.arange(sample, device=device) * tokens // sample
