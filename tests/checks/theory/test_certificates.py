"""No certificate is ever violated, whatever weights, gains and patterns of attention; constructed cases reach it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normlab
from normlab.checks.theory.certificates import certify, entry_bound, observe
from normlab.checks.theory.scheme_stack import find_stack
from normlab.norms import rms
from tests.matrix import parametrize

VARIANTS = [
    *normlab.list_schemes(),
    "peri(step=0.1)",
    "peri(bias=True, norm='layer')",
    "pre(norm='dyt', bias=True)",
    "pre(norm='derf')",
    "pre(form='sphere')",
    "post(norm='l2')",
    "mix(post_fraction=0.5)",
    "hybrid(star=True)",
    "keel(norm='layer', bias=True)",
    "spannorm(entry_norm=False)",
    "geonorm(decay='none', entry_norm=False)",
    "dual(norm='identity')",
    "rezero",
]
SIDE_BY_SIDE = [name for name in normlab.list_schemes() if "parallel" in normlab.scheme(name).topologies]
WIDTH, TOKENS = 8, 6


def decoder(scheme: str, depth: int = 3, **changes) -> normlab.Decoder:
    sizes = {"dim": WIDTH, "heads": 2, "hidden": 12, "vocab_size": 16, "max_length": 32, "tied": False}
    return normlab.Decoder(normlab.DecoderConfig(scheme=scheme, depth=depth, **{**sizes, **changes})).double()


def draw_(model: normlab.Decoder, seed: int, size: float, sharp: float = 1.0) -> normlab.Decoder:
    """Matrices, gains and biases from normal distributions; `sharp` makes every head look at one token."""
    generator = torch.Generator().manual_seed(seed)
    for role in model.find_roles():
        with role.edit() as weight:
            drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(drawn * (size if role.is_matrix else 1.0) * (sharp if role.role in ("q", "k") else 1.0))
    return model


def pass_of(model: normlab.Decoder, seed: int = 0):
    tokens = torch.randint(model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return lambda: model(tokens)


def assert_kept(model: normlab.Decoder, seed: int = 0) -> list[float]:
    """The bounds, none of which a token exceeds by more than rounding can make."""
    stack = model.stack
    seen = observe(stack, pass_of(model, seed))
    bounds = certify(stack, entry_bound(model, seen.entry)).curve
    assert len(bounds) == len(seen.largest) == len(stack.layers) + 1
    for place, (size, bound) in enumerate(zip(seen.largest, bounds, strict=True)):
        # Where squares overflow float64 (no norm, great weights) nothing is proven and nothing can be measured.
        if bound < 1e150:
            assert size <= bound * (1 + seen.slack), (stack.scheme, place)
    return bounds


@settings(deadline=None, max_examples=120)
@given(
    scheme=st.sampled_from(VARIANTS),
    depth=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1e-3, 0.1, 0.5, 3.0]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    bias=st.booleans(),
    sharp=st.sampled_from([1.0, 100.0]),
    kind=st.sampled_from(["gelu", "swiglu"]),
)
def test_no_certificate_is_violated(scheme, depth, seed, size, heads, bias, sharp, kind):
    # nGPT scales the gate of its MLP, so it needs one.
    kind = "swiglu" if scheme == "ngpt" else kind
    model = decoder(scheme, depth, heads=heads[0], kv_heads=heads[1], bias=bias, mlp=kind)
    assert_kept(draw_(model, seed, size, sharp), seed)


@settings(deadline=None, max_examples=25)
@given(
    scheme=st.sampled_from(SIDE_BY_SIDE),
    seed=st.integers(0, 10_000),
    topology=st.sampled_from(["serial", "parallel"]),
    top_k=st.integers(1, 3),
    shared=st.booleans(),
)
def test_no_certificate_is_violated_with_experts_and_parallel_branches(scheme, seed, topology, top_k, shared):
    model = decoder(scheme, topology=topology, experts=3, top_k=top_k, shared_hidden=12 if shared else 0)
    assert_kept(draw_(model, seed, 0.5), seed)


def top_size(model: normlab.Decoder) -> torch.Tensor:
    """RMS of the largest token after the last block, one token of each kind."""
    states: list[torch.Tensor] = []
    hook = model.stack.layers[-1].register_forward_hook(lambda _layer, _args, state: states.append(state))
    model(torch.arange(TOKENS)[None])
    hook.remove()
    return rms(states[0]).max()


@parametrize(
    "scheme", ["pre", "hybrid", "lns", "mix", "keel", "layerscale", "peri", "none"], quick=["pre", "hybrid", "none"]
)
def test_an_adversary_does_not_get_past_the_bound(scheme):
    # Gradient ascent on the embeddings for the largest state, each of RMS 1.
    model = draw_(decoder(scheme, 2, vocab_size=TOKENS, mlp="gelu"), 1, 0.4, sharp=3.0)
    weight, sizes = model.embedding.weight, []
    for _ in range(40):
        weight.data /= rms(weight.data)
        size = top_size(model)
        (gradient,) = torch.autograd.grad(size, weight)
        weight.data += 0.3 * gradient / gradient.norm()
        sizes.append(size.item())
    weight.data /= rms(weight.data)
    bound = assert_kept(model)[-1]
    assert sizes[0] < max(sizes) <= bound * (1 + 1e-12)


# -- tight cases ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_peri_reaches_its_certificate():
    # Every branch returns the same direction as the embedding: the state grows by Δt·γ a branch and nothing is lost.
    model = decoder("peri(step=0.5)", 6, bias=True)
    model.embedding.weight.fill_(1.0)
    for layer in model.stack.layers:
        attention, mlp = layer.branches
        for linear in (attention.out, mlp.down):
            linear.weight.zero_()
            linear.bias.fill_(3.0)
        for step in layer.block.steps:
            step.shape.weight.fill_(2.0)
    bounds = assert_kept(model)
    seen = observe(model.stack, pass_of(model))
    assert bounds[-1] == pytest.approx(1.0 + 6 * 2 * 0.5 * 2.0)
    assert seen.pooled[-1] == pytest.approx(bounds[-1], rel=0.01)


@torch.no_grad()
def test_pre_reaches_its_certificate():
    # One head that copies, and an MLP that copies: a large pre-activation passes GELU unchanged.
    model = decoder("pre", 4, heads=1, mlp="gelu")
    model.embedding.weight.fill_(1.0)
    unit = torch.ones(WIDTH, dtype=torch.float64) / math.sqrt(WIDTH)
    for layer in model.stack.layers:
        attention, mlp = layer.branches
        attention.qkv.weight.copy_(torch.eye(WIDTH).repeat(3, 1))
        attention.out.weight.copy_(torch.eye(WIDTH))
        mlp.up.weight.zero_()
        mlp.up.weight[0] = 100.0 * unit
        mlp.down.weight.zero_()
        mlp.down.weight[:, 0] = unit / 100.0
    bounds = assert_kept(model)
    assert bounds[-1] == pytest.approx(9.0, rel=1e-6)
    assert observe(model.stack, pass_of(model)).pooled[-1] == pytest.approx(bounds[-1], rel=0.01)


# -- what a certificate says ------------------------------------------------------------------------------------------


def kinds(scheme: str, depth: int = 4) -> list[tuple[str, int, int]]:
    model = draw_(decoder(scheme, depth), 0, 0.3)
    return [(s.kind, s.first, s.last) for s in certify(model.stack, entry_bound(model, 1.0)).segments]


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("post", [("resets", 0, 3)]),
        ("deepnorm", [("resets", 0, 3)]),
        ("spannorm", [("resets", 0, 3)]),
        ("hybrid", [("resets", 0, 3)]),
        ("dual", [("resets", 0, 3)]),
        ("ngpt", [("resets", 0, 3)]),
        ("geonorm", [("keeps", 0, 3)]),
        ("keel", [("adds", 0, 0), ("resets", 1, 3)]),
        ("mix(post_fraction=0.5)", [("resets", 0, 1), ("adds", 2, 3)]),
        ("pre", [("adds", 0, 3)]),
        ("lns", [("adds", 0, 3)]),
        ("layerscale", [("adds", 0, 3)]),
        ("peri", [("adds", 0, 3)]),
        ("output", [("adds", 0, 3)]),
        ("none", [("multiplies", 0, 3)]),
    ],
)
def test_what_blocks_do_to_the_bound(scheme, expected):
    assert kinds(scheme) == expected


def test_words_say_where_the_bound_comes_from():
    model = decoder("peri(step=0.5)", 4)
    proven = certify(model.stack, 1.0)
    assert proven.words == "RMS ≤ 5 after 4 blocks, from the gains alone: all blocks add at most 1 each on average"
    assert "spectral norms" in certify(decoder("pre").stack, 1.0).words
    mix = certify(decoder("mix(post_fraction=0.5)", 4).stack, 1.0).words
    assert "blocks 0-1 put the RMS at 1 or below, whatever came before; blocks 2-3 add" in mix


def test_the_residual_step_for_a_bound_of_ten_is_named():
    # 1 + 12 · 2 · Δt = 10.
    assert certify(decoder("peri", 12).stack, 1.0).words.endswith("; Δt = 0.38 would make it 10")
    halved = decoder("peri(step=0.375)", 12)
    assert certify(halved.stack, 1.0).curve[-1] == pytest.approx(10.0)
    # No such step: the scheme has none, resets the state, or is below ten already.
    for scheme in ("output", "post", "peri(step=0.1)"):
        assert "Δt" not in certify(decoder(scheme, 12).stack, 1.0).words


def test_where_there_is_no_certificate_the_words_say_so():
    deep = draw_(decoder("none", 30), 0, 3.0)
    words = certify(deep.stack, 1.0).words
    assert words == "no certificate at this depth, the bound is beyond every number: all blocks multiply the RMS"
    broken = decoder("pre", 4)
    broken.stack.layers[2].branches[1].down.weight.data.fill_(math.nan)
    proven = certify(broken.stack, 1.0)
    assert "beyond every number: blocks 0-1 add at most" in proven.words
    assert "nothing is proven of block 2" in proven.words
    assert [math.isfinite(bound) for bound in proven.curve] == [True, True, True, False, False]


def test_slopes_follow_the_depth_that_the_scheme_gives_them():
    # LN-Scaling divides what a branch reads by √ℓ; with equal weights Λ of an MLP without gate falls exactly so.
    model = decoder("lns", 4, mlp="gelu")
    state = model.stack.layers[0].branches.state_dict()
    for layer in model.stack.layers:
        layer.branches.load_state_dict(state)
    slopes = certify(model.stack, 1.0).slopes
    assert list(slopes) == ["attention", "mlp"]
    for values in slopes.values():
        assert values == pytest.approx([values[0] / math.sqrt(k) for k in (1, 2, 3, 4)])


# -- what a pass shows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["geonorm", "ngpt"])
def test_lengths_are_kept_to_rounding(scheme):
    model = decoder(scheme, 12).float()
    seen = observe(model.stack, pass_of(model))
    assert seen.drift is not None
    assert seen.drift <= seen.slack < 1e-5
    length = 1.0 if scheme == "ngpt" else math.sqrt(WIDTH)
    assert seen.pooled == pytest.approx([length / math.sqrt(WIDTH)] * 13, rel=1e-5)


def test_a_drift_is_seen_in_a_single_token():
    model = decoder("geonorm", 3)

    def longer(_layer, _args, state):
        state = state.clone()
        state[0, 2] *= 1.25
        return state

    model.stack.layers[1].register_forward_hook(longer)
    seen = observe(model.stack, pass_of(model))
    assert seen.drift == pytest.approx(0.25)


def test_schemes_that_add_have_no_drift():
    model = decoder("pre")
    seen = observe(model.stack, pass_of(model))
    assert seen.drift is None
    assert seen.clamped == []


def test_share_of_clamped_angles():
    model = draw_(decoder("geonorm(learned=False)", 3), 0, 5.0)
    assert observe(model.stack, pass_of(model)).clamped == [1.0, 1.0, 1.0]
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.branches[0].out.weight.zero_()
    # Attention proposes nothing, the MLP still far too much.
    assert observe(model.stack, pass_of(model)).clamped == [0.5, 0.5, 0.5]
    small = draw_(decoder("geonorm(learned=False)", 3), 0, 1e-3)
    assert observe(small.stack, pass_of(small)).clamped == [0.0, 0.0, 0.0]


def test_the_second_clamp_counts():
    x, g = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    (write, *_) = (step.write for step in normlab.scheme("geonorm").bind(depth=1, dim=2).block(0).steps)
    write.a.data.fill_(1.0)
    write.b.data.fill_(2.0)
    # Far below the first clamp. The offset fades in: at t = 1e-5 it is 0.02.
    assert [bool(write.clamped(x, t * g)) for t in (0.1, 1e-3, 1e-5, 0.0)] == [True, True, False, False]
    write.second_clamp = False
    assert not write.clamped(x, 0.1 * g)


def test_which_clamp_counts_depends_on_the_order():
    x, g = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    found = {}
    for order in ("clamp-first", "decay-first"):
        write = normlab.scheme("geonorm", order=order).bind(depth=4, dim=2).block(3).steps[0].write
        found[order] = [bool(write.clamped(x, t * g)) for t in (0.5, 1.0, 4.0)]
    # A quarter of 1.0 is below π/4, and of 4.0 above it.
    assert found == {"clamp-first": [False, True, True], "decay-first": [False, False, True]}


@pytest.mark.parametrize("stream", ["fp32", "bf16"])
def test_slack_follows_the_format_of_the_stream(stream):
    model = decoder("post", 8, stream=stream).float()
    seen = observe(model.stack, pass_of(model))
    unit = {"fp32": 2.0**-24, "bf16": 2.0**-8}[stream]
    # 16 steps and 16 roundings beside them in the stream's format, 16 in the branches', which is fp32.
    expected = math.expm1(32 * math.log1p(unit) + 16 * math.log1p(2.0**-24))
    assert seen.slack == pytest.approx(expected)


def test_what_is_not_finite_is_seen_and_proves_nothing():
    model = decoder("pre", 3)
    model.stack.layers[1].branches[0].out.weight.data.fill_(math.inf)
    seen = observe(model.stack, pass_of(model))
    assert math.isfinite(seen.pooled[1])
    assert not math.isfinite(seen.pooled[2])


def test_states_whose_squares_overflow_fp32_are_measured():
    model = decoder("none", 2).float()
    model.embedding.weight.data.fill_(1e25)
    seen = observe(model.stack, pass_of(model))
    assert seen.entry == pytest.approx(1e25)
    assert seen.pooled[0] == pytest.approx(1e25)


def test_the_stack_is_found_in_any_model():
    model = decoder("pre")
    assert find_stack(torch.nn.ModuleDict({"inner": model})) is model.stack
    assert find_stack(torch.nn.Linear(2, 2)) is None
    # The embedding of somebody else's model is not known: what was measured stands for it.
    assert entry_bound(torch.nn.ModuleDict({"inner": model}), 3.0) == 3.0
    assert entry_bound(model, 3.0) == rms(model.embedding.weight).max().item()
