"""Roles: every parameter named once, fused and transposed matrices taken apart, nothing guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab import NormLabError
from normlab.models import MLP, Attention, MoE
from normlab.roles import MATRICES, Part, Role, find_roles, xavier_std


def named(module: nn.Module, **given) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for role in find_roles(module, **given):
        found.setdefault(role.name, []).append(role.role)
    return found


def test_our_sublayers_state_their_roles():
    assert named(Attention(8, 4, kv_heads=2)) == {"qkv.weight": ["q", "k", "v"], "out.weight": ["o"]}
    assert named(MLP(8, 12)) == {"gate_up.weight": ["gate", "up"], "down.weight": ["down"]}
    assert named(MLP(8, 12, "gelu", bias=True)) == {
        "up.weight": ["up"],
        "up.bias": ["bias"],
        "down.weight": ["down"],
        "down.bias": ["bias"],
    }


def test_grouped_queries_have_unequal_parts():
    roles = {role.role: role for role in find_roles(Attention(8, 4, kv_heads=2))}
    assert roles["q"].view().shape == (8, 8)
    assert roles["k"].view().shape == roles["v"].view().shape == (4, 8)
    assert roles["v"].fans == (8, 4)


def test_parts_share_memory_with_their_parameter():
    attention = Attention(8, 4)
    for role in find_roles(attention):
        role.view().fill_({"q": 1.0, "k": 2.0, "v": 3.0, "o": 4.0}[role.role])
    assert attention.qkv.weight.detach().unique_consecutive().tolist() == [1.0, 2.0, 3.0]


def test_stacked_experts_keep_their_axes():
    roles = {role.role: role for role in find_roles(MoE(8, 12, 3, shared_hidden=0))}
    assert roles["gate"].view().shape == (3, 12, 8)
    assert roles["gate"].fans == (8, 12)
    assert roles["down"].view().shape == (3, 8, 12)
    assert roles["down"].fans == (12, 8)
    # The model dimension: what gate reads, what down writes.
    assert roles["gate"].view().shape[roles["gate"].model_axis] == 8
    assert roles["down"].view().shape[roles["down"].model_axis] == 8


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("q_proj", "q"),
        ("k_proj", "k"),
        ("v_proj", "v"),
        ("o_proj", "o"),
        ("out_proj", "o"),
        ("gate_proj", "gate"),
        ("up_proj", "up"),
        ("down_proj", "down"),
        ("fc1", "up"),
        ("fc2", "down"),
        ("fc_in", "up"),
        ("fc_out", "down"),
        ("lm_head", "head"),
    ],
)
def test_names_of_public_code_are_known(name, role):
    assert named(nn.ModuleDict({name: nn.Linear(4, 6, bias=False)})) == {f"{name}.weight": [role]}


def test_embeddings_and_vectors_need_no_name():
    module = nn.ModuleDict({"tokens": nn.Embedding(10, 4), "anything": nn.LayerNorm(4)})
    assert named(module) == {
        "tokens.weight": ["embed"],
        "anything.weight": ["vector"],
        "anything.bias": ["bias"],
    }
    embed = next(role for role in find_roles(module) if role.role == "embed")
    assert embed.view().shape[embed.model_axis] == 4


def test_transposed_layers_of_gpt2_say_their_input_axis():
    from transformers.pytorch_utils import Conv1D

    module = nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(12, 4), "c_proj": Conv1D(4, 4)})})
    roles = {role.role: role for role in find_roles(module) if role.is_matrix}
    assert set(roles) == {"q", "k", "v", "o"}
    assert roles["v"].view().shape == (4, 4)
    assert roles["v"].view().data_ptr() == module["attn"]["c_attn"].weight[:, 8:].data_ptr()
    assert roles["q"].input_axis == -2


def test_the_user_has_the_last_word():
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    assert named(module, given={"0.weight": "up", "2.weight": "down"})["2.weight"] == ["down"]
    fused = nn.ModuleDict({"all": nn.Linear(4, 10, bias=False)})
    parts = [Part("q", 0, 4), Part("k", 4, 3), Part("v", 7)]
    assert [r.view().shape[0] for r in find_roles(fused, {"all.*": parts})] == [4, 3, 3]


def test_what_nobody_can_name_is_an_error():
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    with pytest.raises(NormLabError, match=r"no role for 0\.weight \(8, 4\); 2\.weight \(4, 8\)"):
        find_roles(module)
    with pytest.raises(NormLabError, match="unknown role 'middle'"):
        find_roles(module, {"*.weight": "middle"})
    # A fused matrix of unequal parts is not guessed.
    with pytest.raises(NormLabError, match=r"no role for qkv\.weight"):
        find_roles(nn.ModuleDict({"qkv": nn.Linear(8, 16, bias=False)}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"*weight": [Part("q", 0, 8), Part("k", 8, 4)]}, r"parts must follow .* from 0 to 16, got q 0:8, k 8:12"),
        ({"*weight": [Part("q", 0, 8), Part("k", 4)]}, r"from 0 to 16, got q 0:8, k 4:16"),
        ({"*weight": Part("q", 0, 99)}, r"from 0 to 16, got q 0:99"),
        # The output axis of a transposed layer is the last one.
        ({"*weight": Part("q", 0, 16, -2)}, r"from 0 to 8, got q 0:16"),
        ({"*": "q"}, r"bias: 'q' is the role of a matrix; expected 'bias'; try a pattern that ends in 'weight'"),
    ],
)
def test_roles_that_do_not_fit_a_parameter_are_refused(given, message):
    with pytest.raises(NormLabError, match=message):
        find_roles(nn.Linear(8, 16), given)


def test_xavier_counts_the_fans_of_the_part():
    role = Role("w", nn.Parameter(torch.empty(12, 4)), "v", 8, 4)
    assert xavier_std(role, 0.02) == pytest.approx((2 / 8) ** 0.5)
    assert xavier_std(Role("e", nn.Parameter(torch.empty(12, 4)), "embed"), 0.02) == 0.02
    known = {"q", "k", "v", "o", "gate", "up", "down", "embed", "head", "router", "patch", "position", "mix", "spread"}
    assert set(MATRICES) == known
