"""Initialisation by role, in real models: fused QKV, grouped key heads, gated MLPs, stacked experts.

The scale of a matrix is measured. A sample of n normal numbers gives its standard deviation to a relative 1/√(2n);
five times that is allowed, so that among the few thousand comparisons here none fails by chance (6e-7 each), and
constants that differ by 2 % are told apart from 30,000 entries on.
"""

import math

import pytest
import torch
from torch import nn

import normlab
from normlab.errors import NormLabError
from normlab.models import MLP, Attention
from normlab.roles import Part
from tests.matrix import parametrize

DEPTH, DIM = 6, 192
BASE = 0.02
MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "router", "embed", "head")
MODELS = {
    "fused": {"heads": 4, "hidden": 320},
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 48, "hidden": 320},
    "gelu": {"heads": 4, "hidden": 320, "mlp": "gelu", "bias": True},
    "experts": {"heads": 4, "kv_heads": 2, "hidden": 96, "experts": 4},
}


def decoder(spec, kind="fused", **changes):
    torch.manual_seed(0)
    sizes = {"depth": DEPTH, "dim": DIM, "vocab_size": 256, "tied": False}
    return normlab.Decoder(normlab.DecoderConfig(scheme=spec, **(sizes | MODELS[kind] | changes)))


def samples(model):
    """Role → all entries of its matrices; and role → (fan in, fan out)."""
    entries, fans = {}, {}
    for role in model.find_roles():
        if role.is_matrix:
            entries.setdefault(role.role, []).append(role.view().flatten())
            fans[role.role] = role.fans
    return {role: torch.cat(parts).double() for role, parts in entries.items()}, fans


def has_std(sample, std, factor=1.0):
    error = 5 / math.sqrt(2 * len(sample))
    assert float(sample.square().mean().sqrt()) == pytest.approx(factor * std, rel=error)
    assert abs(float(sample.mean())) < 5 * factor * std / math.sqrt(len(sample))


def xavier(fans):
    return math.sqrt(2 / sum(fans))


def shapes(kind):
    """(fan in, fan out) of each role, from the sizes of the model alone."""
    sizes = MODELS[kind]
    head_dim = sizes.get("head_dim", DIM // sizes["heads"])
    queries, keys = sizes["heads"] * head_dim, sizes.get("kv_heads", sizes["heads"]) * head_dim
    hidden = sizes["hidden"]
    fans = {"q": (DIM, queries), "k": (DIM, keys), "v": (DIM, keys), "o": (queries, DIM)}
    fans |= {"gate": (DIM, hidden), "up": (DIM, hidden), "down": (hidden, DIM)}
    return fans


@pytest.mark.parametrize("kind", MODELS)
def test_roles_cover_the_matrices_of_real_models(kind):
    entries, fans = samples(decoder("pre", kind))
    missing = {"gate"} if kind == "gelu" else set()
    missing |= set() if kind == "experts" else {"router"}
    assert set(entries) == set(MATRICES) - missing
    for role, expected in shapes(kind).items():
        if role not in missing:
            assert fans[role] == expected
            experts = MODELS[kind].get("experts", 1) if role in ("gate", "up", "down") else 1
            assert len(entries[role]) == DEPTH * experts * math.prod(expected)


@pytest.mark.parametrize("kind", MODELS)
def test_deepnorm_shrinks_values_outputs_and_mlp_by_beta(kind):
    beta = (8 * DEPTH) ** -0.25
    assert beta == pytest.approx(0.3799, abs=0.5e-4)
    entries, _ = samples(decoder("deepnorm", kind))
    for role, fans in shapes(kind).items():
        if role in entries:
            # Each part of a fused or stacked matrix is initialised as if it stood alone.
            has_std(entries[role], xavier(fans), 1.0 if role in ("q", "k") else beta)


@pytest.mark.parametrize("kind", MODELS)
def test_deepnorm_on_the_base_multiplies_the_same_matrices(kind):
    beta = (8 * DEPTH) ** -0.25
    for role, sample in samples(decoder("deepnorm(init='base')", kind))[0].items():
        has_std(sample, BASE, beta if role in ("v", "o", "gate", "up", "down") else 1.0)


class Cross(nn.Module):
    """A third sublayer with matrices of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Attention(DIM, 4)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("spec", "depth", "cross", "alpha", "beta"),
    [("deepnorm(decoder_depth=8)", 6, False, 1.4437, 0.4881), ("deepnorm", 8, True, 2.2134, 0.3195)],
    ids=["encoder", "decoder"],
)
def test_deepnorm_in_an_encoder_decoder(spec, depth, cross, alpha, beta):
    """N = 6 and M = 8."""
    blocks = [(Attention(DIM, 4), *([Cross()] if cross else []), MLP(DIM, 320)) for _ in range(depth)]
    stack = normlab.Stack(spec, blocks, DIM).init_(generator=torch.Generator().manual_seed(0))
    entries, fans = samples(stack)
    for role, sample in entries.items():
        has_std(sample, xavier(fans[role]), 1.0 if role in ("q", "k") else beta)
    for layer in stack.layers:
        assert [step.write.keep.value for step in layer.block.steps] == pytest.approx(
            [alpha] * len(blocks[0]), abs=5e-5
        )


def test_deepnorm_takes_alpha_and_beta_as_given():
    entries, fans = samples(decoder("deepnorm(alpha=1.5, beta=0.7)"))
    has_std(entries["v"], xavier(fans["v"]), 0.7)
    has_std(entries["k"], xavier(fans["k"]))


@parametrize("kind", MODELS, quick=["fused", "experts"])
@pytest.mark.parametrize(
    ("spec", "scaled", "divisor"),
    [
        ("spannorm", ("o", "down"), math.sqrt(DEPTH)),
        ("spannorm(scale_init='sublayers')", ("o", "down"), math.sqrt(2 * DEPTH)),
        ("spannorm(scale_init='none')", (), 1.0),
        ("spannorm(scale_inputs=True)", ("o", "down", "v", "up", "gate"), math.sqrt(DEPTH)),
        ("pre", ("o", "down"), math.sqrt(2 * DEPTH)),
        ("pre(depth_init=False)", (), 1.0),
    ],
)
def test_depth_scaled_outputs(spec, scaled, divisor, kind):
    for role, sample in samples(decoder(spec, kind))[0].items():
        has_std(sample, BASE, 1 / divisor if role in scaled else 1.0)


@pytest.mark.parametrize("spec", ["post", "output", "peri", "mix", "lns", "dual", "keel", "layerscale", "geonorm"])
def test_schemes_that_leave_the_base_alone(spec):
    for sample in samples(decoder(spec, "experts"))[0].values():
        has_std(sample, BASE)


def test_post_with_xavier():
    entries, _ = samples(decoder("post(init='xavier')", "grouped"))
    for role, fans in shapes("grouped").items():
        has_std(entries[role], xavier(fans))


@pytest.mark.parametrize("spec", ["pre", "deepnorm(init='base')", "spannorm"])
def test_a_named_base_replaces_the_default(spec):
    default, changed = (samples(decoder(spec, init_std=std))[0] for std in (None, 0.05))
    for role, sample in changed.items():
        has_std(sample, 0.05 / BASE * float(default[role].square().mean().sqrt()))


def test_three_branches_count_in_the_depth_of_pre():
    stack = normlab.Stack("pre", [(Attention(DIM, 4), Cross(), MLP(DIM, 320))] * 1, DIM, depth=1)
    stack.init_(generator=torch.Generator().manual_seed(0))
    has_std(samples(stack)[0]["o"], BASE, 1 / math.sqrt(3))


def test_hybrid_is_small_and_cut_at_three_sigma():
    std = 0.014
    # The variance of a normal distribution cut at c is 1 - 2c φ(c)/(2Φ(c) - 1): 0.9733 at c = 3.
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    shrink = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    entries, _ = samples(decoder("hybrid", "grouped"))
    for role, sample in entries.items():
        factor = 1 / math.sqrt(2 * DEPTH) if role in ("o", "down") else 1.0
        has_std(sample, std * shrink, factor)
        largest = float(sample.abs().max()) / (std * factor)
        # 0.27 % of 40,000 numbers would lie beyond; and the bound itself is rounded to single precision.
        assert 2.9 < largest <= 3 * (1 + 1e-6)


def test_lns_refuses_depth_scaled_outputs():
    with pytest.raises(NormLabError, match="depth_init"):
        normlab.scheme("lns", depth_init=True)


@pytest.mark.parametrize("spec", normlab.list_schemes())
def test_biases_start_at_zero_and_gains_at_one(spec):
    # ngpt has no biases of its own, but a model may.
    model = decoder(spec, "gelu" if spec != "ngpt" else "fused", bias=True)
    for role in model.find_roles():
        value = role.parameter.detach()
        if role.role == "bias":
            assert not value.any(), role.name
        if role.name.endswith(("norm.weight", "read.weight", "exit.weight")):
            assert bool((value == 1).all()), role.name
    assert any(role.role == "bias" for role in model.find_roles())


def test_biases_of_norms_start_at_zero_too():
    model = decoder("deepnorm(norm='layer', bias=True)", bias=True)
    biases = [role for role in model.find_roles() if role.role == "bias"]
    # Four in the sublayers and two in the norms of each block.
    assert len(biases) == 6 * DEPTH
    assert not any(role.parameter.detach().any() for role in biases)


def test_vectors_have_a_view_as_matrices_have():
    """`Role.view()` is for every role, gains and biases included."""
    for role in decoder("geonorm", bias=True, depth=1).find_roles():
        if not role.is_matrix:
            assert role.view().data_ptr() == role.parameter.data_ptr(), role.name


@pytest.mark.parametrize("spec", ["pre", "geonorm", "deepnorm", "spannorm"])
def test_zero_outputs_where_allowed(spec):
    for role, sample in samples(decoder(spec, "experts", zero_outputs=True))[0].items():
        assert bool(sample.any()) == (role not in ("o", "down")), role


@pytest.mark.parametrize("spec", ["peri", "output", "ngpt"])
def test_zero_outputs_refused_where_they_are_normalised(spec):
    with pytest.raises(NormLabError, match="zero_outputs"):
        decoder(spec, zero_outputs=True)


def test_transposed_layers_get_the_same_scales():
    """GPT-2 keeps its matrices as (in, out); the value columns of its fused matrix are the scaled ones."""
    stack = normlab.Stack("deepnorm", [(Transposed(), Transposed())], DIM, roles=Transposed.roles())
    stack.init_(generator=torch.Generator().manual_seed(0))
    beta = 8**-0.25
    for module in stack.layers[0].branches:
        q, k, v = module.fused.detach().double().split(DIM, dim=1)
        for part, factor in ((q, 1.0), (k, 1.0), (v, beta)):
            has_std(part.flatten(), xavier((DIM, DIM)), factor)
        has_std(module.narrow.detach().double().flatten(), xavier((2 * DIM, DIM)), beta)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.empty(DIM, 3 * DIM))
        self.narrow = nn.Parameter(torch.empty(2 * DIM, DIM))

    def forward(self, x):
        return x

    @staticmethod
    def roles():
        fused = [Part(role, i * DIM, DIM, input_axis=-2) for i, role in enumerate("qkv")]
        return {"*fused": fused, "*narrow": Part("down", input_axis=-2)}


# -- nGPT: unit vectors along the model dimension --------------------------------------------------------------------

AXES = {"q": -1, "k": -1, "v": -1, "gate": -1, "up": -1, "head": -1, "embed": -1, "o": -2, "down": -2}


def lengths(model):
    """(role, lengths along the model dimension) of every constrained matrix."""
    for role in model.find_roles():
        if role.role in AXES:
            yield role, role.view().double().norm(dim=AXES[role.role])


def length_error(dtype):
    # Down a column the d squares may be summed one by one: roundings walk at random, √d of them in effect, and the root
    # halves that; once in the library, once here. Two more for the root and the division.
    return (math.sqrt(DIM) + 2) * torch.finfo(dtype).eps


def all_unit(model, dtype):
    return all(float((length - 1).abs().max()) <= length_error(dtype) for _, length in lengths(model))


@pytest.mark.parametrize("kind", ["fused", "grouped", "experts"])
def test_ngpt_has_unit_rows_and_columns_after_initialisation(kind):
    model = decoder("ngpt", kind)
    assert {role.role for role, _ in lengths(model)} == set(AXES)
    assert all_unit(model, torch.float32)
    # Only the direction is left of the base, and it has no preference: entries have mean square 1/d.
    for role, sample in samples(model)[0].items():
        if role in AXES:
            assert float(sample.square().mean()) == pytest.approx(1 / DIM, rel=1e-6)
            assert abs(float(sample.mean())) < 5 / math.sqrt(DIM * len(sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["fused", "grouped", "experts"])
def test_ngpt_returns_to_unit_length_after_a_step(kind, dtype):
    model = decoder("ngpt", kind, depth=2).to(dtype)
    for parameter in model.parameters():
        parameter.data.mul_(1.7).add_(0.01 * torch.randn(parameter.shape).to(dtype))
    directions = {role.name + role.role: (role.view().clone(), length) for role, length in lengths(model)}
    others = {role.name: role.parameter.detach().clone() for role in model.find_roles() if role.role not in AXES}
    model.after_step()
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert all_unit(model, dtype)
    for role, _ in lengths(model):
        before, length = directions[role.name + role.role]
        expected = before.double() / length.unsqueeze(AXES[role.role])
        # One rounding to the format of the weights, after arithmetic in at least single precision.
        allowed = torch.finfo(dtype).eps + length_error(torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(role.view().double(), expected, rtol=allowed, atol=torch.finfo(dtype).tiny)
    for role in model.find_roles():
        if role.role not in AXES:
            assert torch.equal(role.parameter.detach(), others[role.name]), role.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ngpt_constraint_is_idempotent(dtype):
    model = decoder("ngpt", "grouped", depth=2).to(dtype)
    model.after_step()
    once = [parameter.detach().clone() for parameter in model.parameters()]
    model.after_step()
    for before, after in zip(once, model.parameters(), strict=True):
        # The second pass divides by a length of one within its error, and rounds.
        torch.testing.assert_close(after.detach(), before, rtol=length_error(dtype), atol=0)


def test_ngpt_wants_its_own_head():
    with pytest.raises(NormLabError, match="tied"):
        normlab.DecoderConfig(scheme="ngpt", tied=True)
    assert not normlab.DecoderConfig(scheme="ngpt").tied_head


@pytest.mark.parametrize("spec", [name for name in normlab.list_schemes() if name != "ngpt"])
def test_no_other_scheme_touches_weights_after_a_step(spec):
    model = decoder(spec, depth=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.after_step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
