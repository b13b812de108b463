"""The scale test: slopes that theory knows exactly, branches found in anybody's blocks, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normlab
from normlab.checks.theory.records import ScaleRow
from normlab.checks.theory.scale_test import scale_test, summary
from normlab.probes.blocks import find_stacks
from tests.targets.tiny import MODELS, batch_for, hugging_face

TOKENS = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))


def ours(scheme: str, depth: int = 3, **changes) -> normlab.Decoder:
    sizes = {"dim": 16, "heads": 2, "hidden": 24, "vocab_size": 16, "init_std": 0.2, "tied": False}
    torch.manual_seed(0)
    return normlab.Decoder(normlab.DecoderConfig(scheme=scheme, depth=depth, **{**sizes, **changes})).double()


def rows_of(model: nn.Module, run=None, **options) -> list[ScaleRow]:
    return scale_test(model, find_stacks(model)[0], run or (lambda: model(TOKENS)), **options)


class AddsInPlace(nn.Module):
    """A parallel block as Falcon's: what one branch returns is added to, in place."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        update = self.a(read)
        update += self.b(read)
        return x + update


def test_branches_may_be_added_to_in_place():
    torch.manual_seed(0)
    model = nn.Sequential(AddsInPlace(8), AddsInPlace(8)).double()
    rows = rows_of(model, lambda: model(torch.randn(2, 6, 8, dtype=torch.float64)))
    assert [(row.block, row.branch) for row in rows] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    # J is linear in the last matrix, as above.
    assert [row.slope for row in rows] == pytest.approx([1.0] * 4, abs=1e-9)


# -- our schemes, in fp64 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["pre", "lns", "layerscale", "none", "pre(step=0.1)"])
def test_what_adds_a_raw_branch_is_proportional(scheme):
    rows = rows_of(ours(scheme))
    assert len(rows) == 6
    # J is linear in the last matrix: the slope is 1 to the digits of fp64.
    assert [row.slope for row in rows] == pytest.approx([1.0] * 6, abs=1e-9)
    assert {row.finding for row in rows} == {"proportional"}


@pytest.mark.parametrize("scheme", ["peri", "output", "ngpt", "peri(step=0.1, norm='layer')"])
def test_a_norm_behind_the_branch_makes_it_scale_free(scheme):
    rows = rows_of(ours(scheme))
    assert len(rows) == 6
    # The epsilon of 10⁻⁶ is 10⁻⁴ of the smallest variance (0.1²): slopes within 10⁻³.
    assert [row.slope for row in rows] == pytest.approx([0.0] * 6, abs=1e-3)
    assert {row.finding for row in rows} == {"scale-free"}


@pytest.mark.parametrize("scheme", ["post", "deepnorm", "dual", "spannorm"])
def test_a_norm_behind_the_sum_is_in_between(scheme):
    rows = rows_of(ours(scheme))
    assert all(row.slope is not None and 0.05 < row.slope < 1.0 for row in rows)
    assert "partly normalised" in {row.finding for row in rows}


def test_mix_is_both():
    rows = rows_of(ours("mix(post_fraction=0.5)", 4), blocks=range(4))
    assert [row.finding for row in rows] == ["partly normalised"] * 4 + ["proportional"] * 4


def test_geonorm_is_proportional_below_its_clamp_and_free_above():
    def findings(size: float) -> set[str]:
        model = ours("geonorm(decay='none', learned=False)")
        for layer in model.stack.layers:
            for branch in layer.branches:
                for name, parameter in branch.named_parameters():
                    parameter.data *= size if name in ("out.weight", "down.weight") else 1.0
        return {row.finding for row in rows_of(model)}

    assert findings(1e6) == {"scale-free"}
    assert findings(1e-2) <= {"proportional", "partly normalised"}


@pytest.mark.parametrize("changes", [{"topology": "parallel"}, {"experts": 3, "shared_hidden": 8}, {"bias": True}])
def test_other_blocks_of_ours(changes):
    for scheme, slope in (("pre", 1.0), ("peri", 0.0)):
        rows = rows_of(ours(scheme, **changes))
        assert len(rows) == 6
        assert [row.slope for row in rows] == pytest.approx([slope] * 6, abs=1e-3)


def test_a_tiny_branch_is_lifted_out_of_the_reach_of_epsilon():
    model = ours("peri", init_std=1e-4)
    rows = rows_of(model)
    assert {row.finding for row in rows} == {"scale-free"}
    assert all(row.factors[0] > 1.0 for row in rows)


def test_a_small_state_does_not_make_post_look_scale_free():
    model = ours("post")
    model.embedding.weight.data *= 1e-3
    assert rows_of(model, blocks=[0])[0].finding == "partly normalised"


def test_the_gain_is_that_of_the_branch_alone():
    # x + W x without a norm: ‖Wᵀv‖ / ‖v‖, and √d σ of an orthogonal W is exactly its size.
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.Identity(), nn.Linear(8, 8, bias=True)

        def forward(self, x):
            return x + self.inner(self.norm(x))

    blocks = nn.Sequential(Linear(), Linear()).double()
    for block in blocks:
        block.inner.weight.data = 3.0 * torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    rows = rows_of(blocks, lambda: blocks(x))
    assert [row.branch for row in rows] == ["inner", "inner"]
    assert [row.gain for row in rows] == pytest.approx([3.0, 3.0])
    for row in rows:
        assert row.gains == pytest.approx([3.0 * factor for factor in row.factors])


def test_branches_that_return_zero_are_not_measured():
    rows = rows_of(ours("rezero"))
    assert {row.finding for row in rows} == {"not measured"}
    assert summary(rows) == "no branch could be tested: all of them return zero"
    assert summary([]) == "no branch could be tested: no last matrix was found"


# -- blocks of others -------------------------------------------------------------------------------------------------

KNOWN = {
    "gpt2": ("proportional", ["attn.c_proj", "mlp.c_proj"]),
    "llama": ("proportional", ["self_attn.o_proj", "mlp.down_proj"]),
    "qwen3": ("proportional", ["self_attn.o_proj", "mlp.down_proj"]),
    "gemma2": ("scale-free", ["self_attn.o_proj", "mlp.down_proj"]),
    "olmo2": ("scale-free", ["self_attn.o_proj", "mlp.down_proj"]),
    "mistral": ("proportional", ["self_attn.o_proj", "mlp.down_proj"]),
    "neox": ("proportional", ["attention.dense", "mlp.dense_4h_to_h"]),
    "bert": ("partly normalised", ["attention.output.dense", "output.dense"]),
    "vit": ("proportional", None),
    "t5": ("proportional", ["layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_published_architectures(name):
    finding, branches = KNOWN[name]
    model, batch = hugging_face(name).train(), batch_for(name)
    rows = rows_of(model, lambda: model(**batch))
    assert {row.finding for row in rows} == {finding}
    assert {row.block for row in rows} == {0, 1, 2}
    assert len(rows) == 6
    if branches is not None:
        assert [row.branch for row in rows[:2]] == branches


def test_cross_attention_is_a_branch_of_its_own():
    model, batch = hugging_face("t5"), batch_for("t5")
    decoder = find_stacks(model)[1]
    rows = scale_test(model, decoder, lambda: model(**batch), blocks=[0])
    assert [row.branch.split(".")[2] for row in rows] == ["SelfAttention", "EncDecAttention", "DenseReluDense"]


def test_experts_of_others_are_one_branch():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
             "max_position_embeddings": 64}  # fmt: skip
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    batch = batch_for("llama")
    rows = rows_of(model, lambda: model(**batch))
    assert [row.finding for row in rows] == ["proportional"] * 4
    assert rows[0].branch == "self_attn.o_proj"


def test_sublayers_inside_one_child_are_told_apart():
    # Two residual steps inside one child: matrices under the same part, but one reads what the other wrote.
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = x + self.first(x).tanh() * 0 + self.first(x)
            return x + self.second(nn.functional.layer_norm(x, (8,)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = Inner(), nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x) + self.gate(x)

    blocks = nn.Sequential(Outer(), Outer())
    rows = rows_of(blocks, lambda: blocks(torch.randn(2, 3, 8)), blocks=[0])
    assert sorted(row.branch for row in rows) == ["gate", "inner.first", "inner.second"]
    assert {row.finding for row in rows} == {"proportional"}


def test_a_block_without_branches_has_no_rows():
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)) for _ in range(2))
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)) for _ in range(2)))
    stack = find_stacks(model, "*")[0]
    assert scale_test(model, stack, lambda: model(torch.randn(2, 3, 4))) == []
    assert len(blocks) == 2


# -- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_model_is_left_as_it_was(name):
    model, batch = hugging_face(name).train(), batch_for(name)
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    rows_of(model, lambda: model(**batch))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in model.parameters() if p is not first)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_frozen_parameters_and_half_precision():
    model, batch = hugging_face("gemma2").bfloat16(), batch_for("gemma2")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    rows = rows_of(model, lambda: model(**batch))
    # bf16 rounds gains to 2⁻⁸ of themselves: over a factor of 8 the slope is good to 0.01.
    assert [row.slope for row in rows] == pytest.approx([0.0] * 6, abs=0.02)


def test_rows_are_the_same_every_time():
    model = ours("post")
    assert rows_of(model) == rows_of(model)


def test_summary_names_findings_and_blocks():
    words = summary(rows_of(ours("mix(post_fraction=0.5)", 4), blocks=range(4)))
    assert words.startswith("4 of 8 branches (blocks 0-1) partly normalised (slopes ")
    assert "4 of 8 branches (blocks 2-3) proportional (slope 1.00)" in words
    assert summary(rows_of(ours("peri"))).startswith("all 6 branches tested scale-free (slope 0.00)")
