"""transformers 5: ViT whole is our vision Transformer under pre, BERT's layers are our encoder's under post.

Every weight of theirs is copied into our model; values and the gradients of every parameter are compared in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import BertConfig, ViTConfig, ViTForImageClassification
from transformers.models.bert.modeling_bert import BertLayer

import normlab

from .compare import WRONG, check, relative, scatter_, states, tolerance

D, HEADS, HIDDEN, DEPTH, EPS = 32, 4, 48, 3, 1e-6
SIZES = {
    "hidden_size": D, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
    "layer_norm_eps": EPS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OURS = {"depth": DEPTH, "dim": D, "heads": HEADS, "hidden": HIDDEN, "mlp": "gelu", "bias": True}

Copies = list[tuple[nn.Parameter, Callable[[Callable[[str], torch.Tensor]], torch.Tensor]]]


def layer_copies(layer: nn.Module, names: dict[str, str], norms: list[nn.Module]) -> Copies:
    """Which of our parameters takes what from their layer, by their names for q, k, v, o, up, down and two norms."""
    attention, mlp = layer.branches
    copies: Copies = []
    for kind in ("weight", "bias"):
        fused = [f"{names[part]}.{kind}" for part in "qkv"]
        copies.append((getattr(attention.qkv, kind), lambda get, fused=fused: torch.cat([get(name) for name in fused])))
        for module, name in ((attention.out, "o"), (mlp.up, "up"), (mlp.down, "down")):
            copies.append((getattr(module, kind), lambda get, name=f"{names[name]}.{kind}": get(name)))
        for norm, name in zip(norms, ("first", "second"), strict=True):
            copies.append((getattr(norm, kind), lambda get, name=f"{names[name]}.{kind}": get(name)))
    return copies


@torch.no_grad()
def copy(copies: Copies, theirs: nn.Module) -> None:
    for own, rule in copies:
        own.copy_(rule(theirs.get_parameter))


def gradients(copies: Copies, theirs: nn.Module) -> dict[str, float]:
    """Our gradients against theirs, joined as the weights were."""

    def gradient(name: str) -> torch.Tensor:
        found = theirs.get_parameter(name).grad
        assert found is not None, name
        return found

    return {str(i): relative(own.grad, rule(gradient)) for i, (own, rule) in enumerate(copies)}


def backward(output: torch.Tensor) -> torch.Tensor:
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    (weight * output.square()).sum().backward()
    return output


VIT = {
    **{part: f"attention.{part}_proj" for part in "qkvo"}, "up": "mlp.fc1", "down": "mlp.fc2",
    "first": "layernorm_before", "second": "layernorm_after",
}  # fmt: skip
BERT = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense",
    "up": "intermediate.dense", "down": "output.dense", "first": "attention.output.LayerNorm",
    "second": "output.LayerNorm",
}  # fmt: skip


def compare_vit(scheme: str) -> dict[str, float]:
    config = ViTConfig(
        **SIZES, image_size=8, patch_size=2, num_channels=3, num_labels=5, attn_implementation="sdpa"
    )  # fmt: skip
    theirs = ViTForImageClassification(config).double().eval()
    scatter_(list(theirs.parameters()), 0.2)
    with torch.no_grad():
        # Ours has no bias in its head, and a patch's bias is part of its position.
        theirs.classifier.bias.zero_()
        theirs.vit.embeddings.patch_embeddings.projection.bias.zero_()
    sizes = {"image_size": 8, "patch": 2, "channels": 3, "classes": 5}
    chosen = dataclasses.replace(normlab.scheme(scheme), norm="layer", bias=True, eps=EPS)
    ours = normlab.VisionTransformer(normlab.VisionConfig(scheme=chosen, **OURS, **sizes)).double()
    front, root = ours.embedding, math.sqrt(12)
    copies: Copies = [
        (front.weight, lambda get: root * get("vit.embeddings.patch_embeddings.projection.weight").flatten(1)),
        (front.positions, lambda get: get("vit.embeddings.position_embeddings")[0]),
        (front.class_token, lambda get: get("vit.embeddings.cls_token")[0]),
        (ours.stack.exit.weight, lambda get: get("vit.layernorm.weight")),
        (ours.stack.exit.bias, lambda get: get("vit.layernorm.bias")),
        (ours.head.weight, lambda get: get("classifier.weight")),
    ]
    for k, layer in enumerate(ours.stack.layers):
        norms = [module for module in layer.block.modules() if isinstance(module, normlab.norms.Norm)]
        copies += layer_copies(layer, {part: f"vit.layers.{k}.{name}" for part, name in VIT.items()}, norms)
    assert {id(own) for own, _ in copies} == {id(p) for p in ours.parameters()}
    copy(copies, theirs)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output = backward(ours(images))
    found = {"logits": relative(output, backward(theirs(images).logits))}
    # Their weight is ours over √P: so much larger is its gradient.
    copies[0] = (front.weight, lambda get: get("vit.embeddings.patch_embeddings.projection.weight").flatten(1) / root)
    return found | gradients(copies, theirs)


def test_vit_is_pre_with_layer_norms():
    check(compare_vit("pre"), tolerance())


def compare_bert(scheme: str) -> dict[str, float]:
    theirs = nn.ModuleList(BertLayer(BertConfig(**SIZES, attn_implementation="sdpa"), k) for k in range(DEPTH))
    theirs = theirs.double().eval()
    scatter_(list(theirs.parameters()), 0.2)
    chosen = dataclasses.replace(normlab.scheme(scheme), norm="layer", bias=True, eps=EPS)
    ours = normlab.Encoder(normlab.EncoderConfig(scheme=chosen, **OURS, vocab_size=11)).double()
    copies: Copies = []
    for k, layer in enumerate(ours.stack.layers):
        norms = [module for module in layer.block.modules() if isinstance(module, normlab.norms.Norm)]
        copies += layer_copies(layer, {part: f"{k}.{name}" for part, name in BERT.items()}, norms)
    copy(copies, theirs)
    x, same = states(D), states(D)
    hidden = same
    for layer in theirs:
        hidden = layer(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    # BERT turns no queries and keys: its positions are in its embeddings.
    output = backward(ours.stack(x, causal=False))
    return {"output": relative(output, backward(hidden)), "input": relative(x.grad, same.grad)} | gradients(
        copies, theirs
    )


def test_bert_is_post_with_layer_norms():
    check(compare_bert("post"), tolerance())


def test_another_scheme_is_told_apart():
    assert compare_bert("deepnorm")["output"] > WRONG
    assert compare_vit("pre(step=0.9)")["logits"] > WRONG
