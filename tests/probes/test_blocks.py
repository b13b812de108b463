"""Stacks of blocks are found in any tree of modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab import Decoder, DecoderConfig, NormLabError
from normlab.probes.blocks import find_stacks
from tests.targets.tiny import MODELS, hugging_face

SIZE = {"depth": 3, "dim": 16, "heads": 2, "vocab_size": 31, "max_length": 32, "hidden": 24}


class Block(nn.Module):
    def __init__(self, dim: int = 4):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Holder(nn.Module):
    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def names(model: nn.Module, pattern: str | None = None) -> dict[str, int]:
    return {stack.name: len(stack.blocks) for stack in find_stacks(model, pattern)}


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][3]])
def test_hugging_face_models(name):
    assert names(hugging_face(name)) == MODELS[name][3]


def test_a_vision_transformer():
    (stack,) = find_stacks(hugging_face("vit"))
    assert len(stack.blocks) == 3
    assert type(stack.blocks[0]).__name__ == "ViTLayer"


@pytest.mark.parametrize("scheme", ["pre", "peri", "dual", "geonorm"])
def test_our_decoder(scheme):
    model = Decoder(DecoderConfig(scheme=scheme, **SIZE))
    (stack,) = find_stacks(model)
    assert stack.names == [f"stack.layers.{k}" for k in range(3)]
    assert all(block is layer for block, layer in zip(stack.blocks, model.stack.layers, strict=True))
    assert stack.owner is model.stack


def test_experts_are_not_blocks():
    class Experts(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(16))

    assert names(Holder(layers=nn.ModuleList(Experts() for _ in range(2)))) == {"layers": 2}


def test_bare_layers_and_small_lists_give_way_to_blocks():
    head = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    extractor = nn.Sequential(*(Block(2) for _ in range(3)))
    model = Holder(head=head, extractor=extractor, body=nn.Sequential(*(Block(32) for _ in range(4))))
    assert names(model) == {"body": 4}


def test_bare_layers_are_found_where_there_is_nothing_else():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {"": 2}


def test_a_sequential_owns_itself_and_a_list_in_a_list_belongs_to_the_module_around():
    model = Holder(inner=Holder(groups=nn.ModuleList([nn.ModuleList(Block() for _ in range(3))])))
    (stack,) = find_stacks(model)
    assert stack.name == "inner.groups.0"
    assert stack.owner is model.inner
    sequence = nn.Sequential(Block(), Block())
    assert find_stacks(Holder(body=sequence))[0].owner is sequence


def test_shared_blocks_are_listed_as_often_as_they_stand_there():
    block = Block()
    (stack,) = find_stacks(Holder(layers=nn.ModuleList([block] * 4)))
    assert stack.names == [f"layers.{k}" for k in range(4)]
    assert all(listed is block for listed in stack.blocks)


def test_wrappers_of_compile_are_seen_through():
    model = Holder(layers=nn.ModuleList(Block() for _ in range(3)))
    plain = list(model.layers)
    for k in range(3):
        model.layers[k] = torch.compile(model.layers[k], backend="eager")
    (stack,) = find_stacks(torch.compile(model, backend="eager"))
    assert stack.names == ["layers.0", "layers.1", "layers.2"]
    assert all(one is other for one, other in zip(stack.blocks, plain, strict=True))


def test_a_pattern_names_the_blocks():
    model = hugging_face("t5")
    assert names(model, "decoder.block.*") == {"decoder.block": 2}
    assert names(model, "*.block.*") == {"encoder.block": 3, "decoder.block": 2}
    (stack,) = find_stacks(model, "encoder.block.*.layer.1")
    assert stack.names == [f"encoder.block.{k}.layer.1" for k in range(3)]
    assert stack.owner is model.encoder


def test_a_pattern_is_no_regular_expression():
    model = Holder(layers=nn.ModuleList(Block() for _ in range(2)), layersX0=Block())
    assert names(model, "layers.*") == {"layers": 2}
    with pytest.raises(NormLabError, match=r"matches '\(\*'; lists in it: layers"):
        find_stacks(model, "(*")


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 3), Holder(), Holder(layers=nn.ModuleList([Block()])), nn.Sequential(nn.ReLU(), nn.ReLU())],
    ids=["linear", "empty", "one block", "no parameters"],
)
def test_no_blocks_is_one_clear_line(model):
    with pytest.raises(NormLabError, match="no repeated blocks") as error:
        find_stacks(model)
    assert "\n" not in str(error.value)
    with pytest.raises(NormLabError, match="matches"):
        find_stacks(model, "nothing.*")
