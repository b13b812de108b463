"""Bounds of branches against brute force: no input exceeds them, and constructed ones come close."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from normlab.checks.theory.branch_bounds import branch_bound, slopes_by_role, spectral_norm
from normlab.errors import NormLabError
from normlab.models import MLP, Attention
from normlab.models.moe import MoE
from normlab.norms import RMSNorm, rms
from normlab.probes.blocks import find_stacks
from normlab.schemes.contract.scales import LearnedScale
from tests.targets.tiny import batch_for, hugging_face

DIM, TOKENS = 8, 5


def draw_(module: nn.Module, seed: int, size: float = 1.0) -> nn.Module:
    """Every parameter from a normal distribution, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def tokens(seed: int, size: float = 1.0) -> torch.Tensor:
    """Tokens of RMS `size`, some of them with one channel alone: what a spectral norm is reached with."""
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, 0] = 0.0
    x[:, 0, seed % DIM] = 1.0
    return size * x / rms(x)


def largest(module: nn.Module, x: torch.Tensor, **options) -> float:
    with torch.no_grad():
        return float(rms(module(x, **options)).max())


# -- spectral norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (4, 5, 6)])
def test_spectral_norm_is_the_largest_singular_value(shape):
    matrix = torch.randn(shape)
    expected = torch.linalg.svdvals(matrix.double())[..., 0]
    # The eigenvalue of the Gram matrix carries σ² to 10⁻¹⁵ or so.
    torch.testing.assert_close(spectral_norm(matrix), expected, rtol=1e-12, atol=0.0)


def test_spectral_norm_of_zero_and_of_what_is_not_finite():
    assert spectral_norm(torch.zeros(3, 2)) == 0.0
    broken = torch.stack([torch.eye(2), torch.full((2, 2), math.nan), torch.full((2, 2), math.inf)])
    found = spectral_norm(broken)
    assert found[0] == 1.0
    assert found[1:].isnan().all()


# -- attention --------------------------------------------------------------------------------------------------------


def test_heads_that_look_at_different_tokens_reach_the_bound():
    # Two heads, one channel each; the first looks where channel 0 is large, the second where channel 1 is.
    attention = Attention(2, heads=2).double()
    eye = torch.eye(2, dtype=torch.float64)
    query = 100.0 * torch.ones(2, 2, dtype=torch.float64)
    attention.qkv.weight.data = torch.cat([query, eye, eye])
    attention.out.weight.data = eye.clone()
    x = torch.tensor([[[math.sqrt(2), 0.0], [0.0, math.sqrt(2)]]], dtype=torch.float64)
    assert float(rms(x).max()) == pytest.approx(1.0)
    assert largest(attention, x, causal=False) == pytest.approx(math.sqrt(2))
    assert branch_bound(attention)(1.0) == pytest.approx(math.sqrt(2))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    bias=st.booleans(),
    sharp=st.sampled_from([0.0, 1.0, 1e3]),
    size=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    norm=st.booleans(),
)
def test_no_attention_exceeds_its_bound(seed, heads, bias, sharp, size, norm):
    attention = Attention(DIM, *heads, bias=bias)
    if norm:
        attention.accept("v-norm", RMSNorm(attention.head_dim, bias=True))
    draw_(attention, seed)
    # Scores of thousands: every head looks at one token of its own choice.
    attention.qkv.weight.data[: (heads[0] + heads[1]) * attention.head_dim] *= sharp
    x = size * tokens(seed)
    for causal in (True, False):
        assert largest(attention, x, causal=causal) <= branch_bound(attention)(size) * (1 + 1e-12)


def test_an_unknown_norm_on_the_values_proves_nothing():
    attention = Attention(DIM, 2)
    attention.accept("v-norm", nn.LayerNorm(4))
    assert branch_bound(attention)(1.0) == math.inf


# -- feed-forward networks --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    scaled=st.booleans(),
    size=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
)
def test_no_mlp_exceeds_its_bound(seed, kind, bias, scaled, size):
    mlp = MLP(DIM, 12, kind, bias=bias)
    for need in sorted(mlp.offers) if scaled else ():
        mlp.accept(need, LearnedScale(12))
    draw_(mlp, seed)
    assert largest(mlp, size * tokens(seed)) <= branch_bound(mlp)(size) * (1 + 1e-12)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["gelu", "swiglu"]),
    top_k=st.integers(1, 3),
    shared=st.sampled_from([0, 6]),
    renormalise=st.booleans(),
)
def test_no_mixture_of_experts_exceeds_its_bound(seed, kind, top_k, shared, renormalise):
    moe = MoE(DIM, 6, experts=3, top_k=top_k, kind=kind, shared_hidden=shared, renormalise=renormalise)
    draw_(moe, seed)
    assert largest(moe, tokens(seed)) <= branch_bound(moe)(1.0) * (1 + 1e-12)


def test_bounds_of_mlps_are_reached():
    # One direction in, one channel inside, one direction out: |φ(a)| → |a| for large a makes both bounds exact.
    unit = torch.ones(DIM, dtype=torch.float64) / math.sqrt(DIM)
    inside = torch.zeros(12, 1, dtype=torch.float64)
    inside[0] = 100.0
    plain, gated = MLP(DIM, 12, "gelu").double(), MLP(DIM, 12, "swiglu").double()
    plain.up.weight.data = inside @ unit[None]
    gated.gate_up.weight.data = torch.cat([inside, inside]) @ unit[None]
    plain.down.weight.data = gated.down.weight.data = unit[:, None] @ inside.T
    x = math.sqrt(DIM) * unit[None, None]
    for mlp in (plain, gated):
        assert largest(mlp, x) == pytest.approx(branch_bound(mlp)(1.0), rel=0.01)


def test_a_module_may_state_its_own_bound_and_strangers_have_none():
    class Halving(nn.Module):
        def rms_bound(self, rms_in: float) -> float:
            return rms_in / 2

    assert branch_bound(Halving())(3.0) == 1.5
    assert branch_bound(nn.Linear(4, 4))(1.0) == math.inf


def test_weights_that_are_not_finite_give_no_bound():
    mlp = MLP(DIM, 12)
    mlp.down.weight.data.fill_(math.nan)
    assert math.isnan(branch_bound(mlp)(1.0))


# -- foreign blocks ---------------------------------------------------------------------------------------------------


def test_slopes_of_llama_from_its_matrices():
    block = hugging_face("llama").model.layers[1]
    attention, mlp = block.self_attn, block.mlp
    heads = [torch.linalg.svdvals(head)[0] for head in attention.v_proj.weight.detach().double().split(8)]
    out = torch.linalg.svdvals(attention.o_proj.weight.detach().double())[0]
    # Two value heads, each read by two query heads.
    expected = float(out * torch.stack(heads).norm() * math.sqrt(2))
    slopes = slopes_by_role(block)
    assert slopes["self_attn.o_proj"] == pytest.approx(expected, rel=1e-9)
    norms = [torch.linalg.svdvals(m.weight.detach().double())[0] for m in (mlp.up_proj, mlp.down_proj)]
    row = mlp.gate_proj.weight.detach().double().norm(dim=1).max()
    assert slopes["mlp.down_proj"] == pytest.approx(float(norms[0] * norms[1] * row * math.sqrt(32)), rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "mistral"])
def test_slopes_bound_what_foreign_branches_return(name):
    model = hugging_face(name).double()
    block = find_stacks(model)[0].blocks[1]
    slopes = slopes_by_role(block)
    assert len(slopes) == 2
    sizes: dict[str, tuple[float, float]] = {}
    for path in slopes:
        part = block.get_submodule(path.split(".")[0])
        part.register_forward_hook(_sizes_into(sizes, path), with_kwargs=True)
    with torch.no_grad():
        model(**batch_for(name))
    for path, slope in slopes.items():
        seen, returned = sizes[path]
        # What a gated MLP returns grows with the square of what it is given.
        assert returned <= slope * max(seen, seen**2), path


def _sizes_into(sizes: dict[str, tuple[float, float]], path: str):
    def keep(_part, args, kwargs, output):
        seen = args[0] if args else kwargs["hidden_states"]
        returned = output[0] if isinstance(output, tuple) else output
        sizes[path] = (float(rms(seen).max()), float(rms(returned).max()))

    return keep


def test_a_matrix_without_a_role_is_refused():
    with pytest.raises(NormLabError, match="query_key_value"):
        slopes_by_role(hugging_face("neox").gpt_neox.layers[0])
    with pytest.raises(NormLabError, match="no branch"):
        slopes_by_role(nn.LayerNorm(4))
