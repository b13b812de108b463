"""How far the radius drifts where a scheme never re-imposes it, over 200 sublayers, in both stream formats.

The measured figures stand in docs/log.md; the bounds here are derived from the arithmetic.
"""

from __future__ import annotations

import math

import pytest
import torch

import normlab

SUBLAYERS, DIM = 200, 256
# Half an ulp relative to the value: the largest rounding error of one element.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@torch.no_grad()
def drift(scheme: normlab.Scheme, dtype: torch.dtype) -> torch.Tensor:
    """log ‖x_200‖/‖x_0‖ of 64 tokens under random branches of unit RMS."""
    bound = scheme.bind(depth=SUBLAYERS // 2, dim=DIM)
    state = bound.entry()(torch.randn(64, DIM)).to(dtype)
    start = torch.linalg.vector_norm(state.double(), dim=-1)
    branches = [lambda x: torch.randn(x.shape).to(x.dtype)] * 2
    for k in range(SUBLAYERS // 2):
        state = bound.block(k)(state, branches)
    return (torch.linalg.vector_norm(bound.hidden(state).double(), dim=-1) / start).log()


@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize("decay", ["harmonic", "none"])
def test_geonorm_radius_walks_without_bias(decay, dtype):
    found = drift(normlab.scheme("geonorm", decay=decay), dtype)
    # Rounding x_i by a relative δ_i moves the length by Σ x_i² δ_i / Σ x_i², a deviation of δ·√(3/D) for Gaussian x.
    # δ is uniform within h, so δ = h/√3 and one step moves the length by h/√D, at random. In fp32 the step itself is
    # computed with as many bits: five more roundings of each element, and about four of the two coefficients that are
    # common to all, 1 − cos θ and sin θ. At θ = π/4 those move the length by (0.71 · 0.29 + 0.71 · 0.71)·2h/√3.
    wide = dtype == torch.float32
    one_step = math.hypot(math.sqrt((6 if wide else 1) / DIM), 0.8 if wide else 0.0)
    walk = HALF_ULP[dtype] * one_step * math.sqrt(SUBLAYERS)
    # One of 64 Gaussian tokens lies beyond 4.5 deviations once in 2,000 runs; the seed is fixed.
    assert found.abs().max() <= 4.5 * walk
    assert found.mean().abs() <= 4.5 * walk / math.sqrt(len(found))


@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize("name", ["ngpt", "post", "spannorm", "keel", "deepnorm"])
@torch.no_grad()
def test_renormalising_schemes_do_not_drift(name, dtype):
    # One rounding to the stream's format at the end of every step, whatever came before: keel's first block adds.
    bound = normlab.scheme(name).bind(depth=SUBLAYERS // 2, dim=DIM)
    state = bound.entry()(torch.randn(64, DIM)).to(dtype)
    for k in range(SUBLAYERS // 2):
        state = bound.block(k)(state, [lambda x: torch.randn(x.shape).to(x.dtype)] * 2)
    length = torch.linalg.vector_norm(bound.hidden(state).double(), dim=-1)
    target = 1.0 if name == "ngpt" else math.sqrt(DIM)
    # eps = 1e-6 under the root takes 5e-7 off; the rest is rounding.
    assert (length / target - 1).abs().max() <= HALF_ULP[dtype] + 1e-6
