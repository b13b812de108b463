"""Measures against float64, closed forms and brute force; huge, tiny, zero, broken and empty states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normlab.errors import NormLabError
from normlab.probes import measures
from normlab.probes.hidden_state import TOKENS, HiddenState, sample
from normlab.probes.profile import BLOCK, BOUNDARY

# One fp32 operation; a sum of n terms of one sign costs log2(n) of them, and the measures do a handful more.
EPS = torch.finfo(torch.float32).eps


def close(measured: torch.Tensor, expected: float | torch.Tensor, *, operations: int = 20) -> None:
    assert measured.ndim == 0
    torch.testing.assert_close(
        measured.double(), torch.as_tensor(expected).double(), rtol=operations * EPS, atol=operations * EPS
    )


def state(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape) * scale


@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 1), (3, 127), (2, 2, 3, 4)])
def test_sizes_follow_their_definitions(shape):
    h = state(*shape)
    wide = h.double()
    tokens = wide.reshape(-1, shape[-1])
    close(measures.rms(h), wide.square().mean().sqrt())
    close(measures.norm(h), wide.norm())
    close(measures.mean_abs(h), wide.abs().mean())
    close(measures.max_abs(h), wide.abs().max())
    close(measures.var_entry(h), tokens.var(-1, correction=0).mean())
    close(measures.var_data(h), tokens.var(0, correction=0).mean())
    close(measures.kurtosis(h), wide.pow(4).mean() / wide.square().mean().square())
    close(measures.outlier_ratio(h), wide.abs().max() / wide.square().mean().sqrt())


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_squares_neither_overflow_nor_underflow(scale):
    h = state(4, 9)
    for measure in (measures.rms, measures.norm, measures.mean_abs, measures.max_abs):
        # Multiplying by a scale that is no power of two rounds every entry once.
        close(measure(h * scale) / scale, measure(h))
    for measure in (measures.kurtosis, measures.token_cosine, measures.dist_to_mean, measures.outlier_ratio):
        close(measure(h * scale), measure(h))
    assert measures.ranks(measures.gram(h * scale)) == pytest.approx(measures.ranks(measures.gram(h)), rel=100 * EPS)


def test_half_precision_is_widened_before_it_is_squared():
    h = torch.full((2, 3), 60000.0, dtype=torch.float16)
    close(measures.rms(h) / 60000, 1.0)
    close(measures.norm(h) / 60000, math.sqrt(6))
    assert measures.rms(h).dtype == torch.float32


def test_the_norm_of_several_tensors_is_that_of_all_their_entries():
    parts = [state(3), state(2, 2, scale=1e25), state(5, scale=1e25)]
    close(measures.norm(*parts) / 1e25, torch.cat([part.flatten().double() for part in parts]).norm() / 1e25)
    with pytest.raises(NormLabError, match="at least one tensor"):
        measures.norm()


def test_variance_survives_a_large_mean():
    h = 1000.0 + state(64, 32)
    # The mean's rounding, 1000 eps relative to a spread of 1, enters squared; that of the entries was there before.
    close(measures.var_entry(h), h.double().var(-1, correction=0).mean(), operations=100)
    close(measures.var_data(h), h.double().var(0, correction=0).mean(), operations=100)


def pairwise_cosine(h: torch.Tensor) -> torch.Tensor:
    u = torch.nn.functional.normalize(h.double(), dim=-1)
    gram, n = u @ u.mT, h.shape[-2]
    return ((gram.sum((-2, -1)) - n) / (n * (n - 1))).mean()


def test_token_cosine_equals_the_mean_of_all_pairs_within_a_sequence():
    h = state(3, 6, 8) + 2 * state(3, 1, 8)
    close(measures.token_cosine(h), pairwise_cosine(h))
    centred = torch.nn.functional.normalize(h.double(), dim=-1)
    apart = (centred - centred.mean(-2, keepdim=True)).square().sum(-1).mean()
    close(measures.dist_to_mean(h), apart)


def test_collapsed_tokens_have_cosine_one_and_opposite_ones_minus_one():
    direction = state(1, 1, 16)
    collapsed = direction * torch.rand(2, 9, 1).add(0.5)
    close(measures.token_cosine(collapsed), 1.0)
    close(measures.dist_to_mean(collapsed), 0.0)
    assert measures.ranks(measures.gram(collapsed)) == pytest.approx((1.0, 1.0), abs=1000 * EPS)
    close(measures.token_cosine(torch.cat([direction, -direction], 1)), -1.0)


def test_without_the_mean_of_all_tokens_the_rest_is_measured():
    h = state(3, 6, 8) + 30 * state(1, 1, 8)
    rest = h.double() - h.double().mean((0, 1))
    # Thirty times larger than what is left of it, the mean has taken as many digits away.
    close(measures.rest_cosine(h), pairwise_cosine(rest), operations=300)
    close(measures.token_cosine(h), 1.0, operations=1e5)
    found, _ = measures.ranks(measures.gram(HiddenState(h).rest))
    wanted, _ = measures.ranks(measures.gram(rest.float()))
    assert found == pytest.approx(wanted, rel=1e5 * EPS)
    assert measures.ranks(measures.gram(h))[0] < 2.0 < 5.0 < found


def test_sequences_that_are_one_token_each_stay_so_without_the_mean():
    collapsed = state(4, 1, 16).expand(4, 9, 16)
    close(measures.rest_cosine(collapsed), 1.0)
    # The mean of one sequence is that of all.
    assert measures.rest_cosine(state(1, 9, 16)).isnan()
    assert measures.rest_cosine(state(9, 16)).isnan()


@pytest.mark.parametrize("tokens", [7, 333, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_taken_for_what_is_left_of_the_same_token(tokens, dtype):
    same = state(1, 1, 16).to(dtype).expand(2, tokens, 16)
    assert measures.rest_cosine(same).isnan()
    assert measures.var_data(same) == 0.0
    assert measures.ranks(measures.gram(HiddenState(same).rest)) == (0.0, 0.0)
    # A part in a thousand is no rounding.
    apart = same.float() * torch.randn(2, tokens, 1).mul(1e-3).add(1.0)
    assert measures.rest_cosine(apart).isfinite()
    assert measures.ranks(measures.gram(HiddenState(apart).rest))[0] == pytest.approx(1.0, abs=0.01)


def test_a_broken_token_does_not_spoil_the_rest():
    h = state(3, 6, 8)
    spoilt = h.clone()
    spoilt[1, 2, 3] = math.nan
    whole = torch.cat([h[1, :2], h[1, 3:]])
    centre = torch.cat([h[0], whole, h[2]]).double().mean(0)
    rows = [pairwise_cosine((tokens.double() - centre)[None]) for tokens in (h[0], whole, h[2])]
    close(measures.rest_cosine(spoilt), sum(rows) / 3)


def test_one_token_has_no_cosine_and_a_zero_token_no_direction():
    assert measures.token_cosine(state(3, 1, 4)).isnan()
    h = state(1, 5, 4)
    padded = torch.cat([h, torch.zeros(1, 2, 4)], 1)
    close(measures.token_cosine(padded), measures.token_cosine(h))
    close(measures.dist_to_mean(padded), measures.dist_to_mean(h))


@pytest.mark.parametrize("shape", [(4, 3, 16), (50, 7), (7, 50), (1, 1)])
def test_ranks_against_singular_values_in_float64(shape):
    h = state(*shape) * torch.linspace(0.01, 3, shape[-1])
    squares = torch.linalg.svdvals(h.double().reshape(-1, shape[-1])).square()
    share = squares / squares.sum()
    products = measures.gram(h)
    effective, stable = measures.ranks(products)
    # An eigenvalue is wrong by n eps of the largest; the entropy multiplies that by log(1/eps) ≈ 16 in each of n terms.
    n = len(products)
    assert effective == pytest.approx(float(torch.exp(-(share * share.log()).sum())), rel=16 * n * n * EPS)
    assert stable == pytest.approx(float(squares.sum() / squares.max()), rel=16 * n * EPS)


def test_ranks_of_orthogonal_tokens_and_of_zero():
    assert measures.ranks(measures.gram(torch.eye(6).repeat(2, 1))) == pytest.approx((6.0, 6.0), rel=200 * EPS)
    assert measures.ranks(measures.gram(torch.zeros(3, 4))) == (0.0, 0.0)
    assert all(map(math.isnan, measures.ranks(measures.gram(torch.full((3, 4), math.nan)))))


def test_many_tokens_are_sampled_evenly():
    h = torch.zeros(1000, 300)
    h[torch.arange(256) * 1000 // 256, torch.arange(256)] = 1.0
    assert measures.ranks(measures.gram(h))[0] == pytest.approx(256.0, rel=10000 * EPS)
    assert measures.gram(h, most=10).shape == (10, 10)


@pytest.mark.parametrize("shape", [(3, 10, 4), (8, 1024, 4), (500, 197, 4), (7, 5000, 2), (9, 2, 600, 2), (90000, 2)])
def test_a_probe_looks_at_so_many_tokens_spread_over_all(shape):
    places = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(shape)
    found = sample(places)
    assert found.shape[0] * found.shape[1] <= TOKENS
    assert found.shape[0] * found.shape[1] >= min(math.prod(shape[:-1]), TOKENS // 2)
    assert found.shape[1] >= min(shape[-2], 64)
    positions = (found[..., 0] % shape[-2]).unique()
    # Evenly spaced from the first on: every gap is the same up to one.
    gaps = positions.diff(append=torch.tensor([shape[-2]]))
    assert positions[0] == 0
    assert gaps.max() - gaps.min() <= 1
    if math.prod(shape[:-1]) <= TOKENS:
        assert torch.equal(found.reshape(shape), places)


def test_increment_align_and_angle_follow_their_definitions():
    h, step = state(2, 5, 8), state(2, 5, 8, scale=0.3)
    found = measures.block(h, h + step)
    cosine = torch.cosine_similarity(h.double(), step.double(), dim=-1)
    turned = torch.cosine_similarity(h.double(), (h + step).double(), dim=-1)
    close(found["branch_rms"], step.double().square().mean().sqrt())
    close(found["align"], cosine.mean())
    close(found["ang"], turned.acos().mean())
    close(found["block_influence"], (1 - turned).mean())


def test_small_angles_keep_their_digits():
    h = torch.tensor([[1.0, 0.0]])
    after = torch.tensor([[1.0, 1e-5]])
    assert measures.ang(h, after).item() == pytest.approx(1e-5, rel=1e-5)
    assert measures.block_influence(h, after).item() == pytest.approx(5e-11, rel=1e-5)


def test_aligned_and_orthogonal_increments():
    h = state(3, 4)
    close(measures.align(h, 0.1 * h), 1.0)
    close(measures.align(torch.eye(4)[:2], torch.eye(4)[2:]), 0.0)
    assert measures.align(h, torch.zeros_like(h)) == 0


def rounded_away(h: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Brute force: the sum, rounded to bf16, is the state that it was added to."""
    return (h.double() + step.double()).to(torch.bfloat16) == h.to(torch.bfloat16)


@given(st.integers(0, 10**6))
def test_absorption_is_what_adding_in_bf16_loses(seed):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(1, 512, generator=generator) * 2.0 ** torch.randint(-20, 20, (1, 512), generator=generator)
    h = h.to(torch.bfloat16).float()
    step = h * 2.0 ** (-12 * torch.rand(1, 512, generator=generator)) * torch.randn(1, 512, generator=generator).sign()
    # At a power of two the numbers below are twice as dense, so that half as much moves the state downwards. And torch
    # goes from double to bf16 by way of fp32, which can round what is just above half a unit down to it.
    halves = step.abs() * 2.0 ** (9 - h.frexp().exponent)
    ordinary = (h.frexp().mantissa.abs() != 0.5) & ((halves - 1).abs() > 2**-14)
    h, step = h[ordinary][None], step[ordinary][None]
    close(measures.absorb_bf16(h, step), rounded_away(h, step).double().mean())


def test_absorption_at_a_power_of_two_and_at_half_a_unit():
    h = torch.tensor([[1.0, 1.0, 1.0, -3.0]])
    half = 2.0**-8
    below, above = half * (1 - 2**-10), half * (1 + 2**-10)
    assert measures.absorb_bf16(h, torch.tensor([[below, above, -below, above]])) == 0.75
    assert rounded_away(h, torch.tensor([[below, above, below, above]])).float().mean() == 0.75


def test_absorption_of_nothing_and_in_a_bf16_model():
    h = state(3, 64)
    assert measures.absorb_bf16(h, torch.zeros_like(h)) == 0
    assert measures.absorb_bf16(torch.zeros_like(h), h) == 0
    low, step = h.to(torch.bfloat16), state(3, 64, scale=2e-3)
    after = (low.float() + step).to(torch.bfloat16)
    # What a bf16 model lost is an increment of exactly zero.
    seen = measures.absorb_bf16(low, measures.increment(low, after))
    assert seen == (after == low).float().mean() > 0.3


def test_channels_that_stand_out_are_named_largest_first():
    h = state(10, 200)
    h[3, 17], h[4, 5] = 100.0, -50.0
    assert measures.top_channels(h).tolist() == [17, 5, -1, -1, -1, -1, -1, -1]
    assert measures.top_channels(state(4, 3)).tolist() == [-1] * 8
    assert measures.top_channels(h, count=1).tolist() == [17]
    # One entry of x among n of 1 is x / √((n - 1 + x²) / n) RMS: 5.9 and 6.1 for these.
    for large, found in ((5.97, [-1]), (6.18, [3])):
        spike = torch.ones(1, 1000)
        spike[0, 3] = large
        assert measures.top_channels(spike, count=1).tolist() == found


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_left_out(poison):
    h, after = state(2, 6, 8), state(2, 6, 8)
    spoilt, spoilt_after = h.clone(), after.clone()
    spoilt[0, 2, 3] = spoilt_after[0, 2, 3] = poison
    close(measures.broken(spoilt), 1 / 96)
    rest = torch.cat([h[0, :2], h[0, 3:], h[1]])
    entries = torch.cat([h.flatten()[: 2 * 8 + 3], h.flatten()[2 * 8 + 4 :]])
    close(measures.rms(spoilt), entries.double().square().mean().sqrt())
    close(measures.norm(spoilt), entries.double().norm())
    close(measures.var_entry(spoilt), measures.var_entry(rest))
    close(measures.var_data(spoilt), measures.var_data(rest))
    cosines = [pairwise_cosine(torch.cat([h[0, :2], h[0, 3:]])), pairwise_cosine(h[1])]
    close(measures.token_cosine(spoilt), sum(cosines) / 2)
    found = measures.boundary(spoilt) | measures.block(spoilt, spoilt_after) | measures.gradient(spoilt)
    assert all(value.isfinite() for value in found.values())
    rest_after = torch.cat([after[0, :2], after[0, 3:], after[1]])
    close(found["ang"], measures.ang(rest, rest_after))


def test_a_state_that_is_broken_everywhere_answers_nan():
    h = torch.full((2, 3, 4), math.nan)
    found = measures.boundary(h) | measures.block(h, h)
    assert found.pop("broken") == 1
    assert all(value.isnan() for value in found.values())


def test_zero_states_have_finite_measures():
    h = torch.zeros(2, 3, 4)
    found = measures.boundary(h) | measures.block(h, h) | measures.gradient(h)
    # Without a direction there is no cosine.
    assert {name for name, value in found.items() if not value.isfinite()} == {"cos", "cos_rest", "dist_to_mean"}


def test_empty_states_do_not_raise():
    h = torch.zeros(0, 3, 4)
    assert measures.boundary(h)["rms"].isnan()
    assert measures.block(h, h)["branch_rms"].isnan()
    assert measures.top_channels(h).tolist() == [-1] * 8


def test_names_are_those_of_a_profile():
    h = state(2, 3, 4)
    # The others follow from these: ranks from the Gram matrix, the outlier ratio from the pooled sizes.
    assert {*measures.boundary(h), *measures.gradient(h)} == {*BOUNDARY} - {
        "erank",
        "erank_rest",
        "stable_rank",
        "outlier_ratio",
    }
    assert set(measures.block(h, h)) <= set(BLOCK)
    assert all(value.ndim == 0 for value in (measures.boundary(h) | measures.block(h, h)).values())


def test_wrong_shapes_are_refused_in_one_line():
    with pytest.raises(NormLabError, match="one shape"):
        measures.increment(state(2, 3), state(3, 3))
    with pytest.raises(NormLabError, match="tokens, width"):
        measures.var_entry(state(3))


def test_powers_of_two_are_those_of_the_exponent():
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.rand(20000, generator=generator) + 1
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(1.0))
    mantissas[:3] = torch.tensor([1.0, float(below), float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))])
    for exponent in (-126, -125, -60, -1, 0, 1, 60, 103):
        x = torch.ldexp(mantissas, torch.tensor(exponent)) * torch.where(mantissas > 1.5, 1, -1)
        assert torch.equal(measures.power_of_two(x), torch.full_like(x, 2.0**exponent)), exponent
    assert measures.power_of_two(torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 1.0, 2.0**95, 2.0**110])
def test_what_bf16_loses_does_not_depend_on_the_size_of_the_state(scale):
    h, step = state(3, 5, 64), state(3, 5, 64, scale=0.01)
    close(measures.absorb_bf16(h * scale, step * scale), measures.absorb_bf16(h, step))
