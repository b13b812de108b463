"""The vision Transformer: patches, places, pooling, and the scheme's rules on what stands in front of its stack."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

import normlab
from normlab import NormLabError, VisionConfig, VisionTransformer
from normlab.models.patches import cut
from tests.matrix import parametrize

SIZE = {"depth": 2, "dim": 32, "heads": 4, "hidden": 48, "image_size": 12, "patch": 4, "channels": 3, "classes": 7}
PIXELS = 3 * 4 * 4


@pytest.fixture(params=normlab.list_schemes())
def name(request) -> str:
    return request.param


def images(batch: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(3), dtype=dtype)


def labels(batch: int = 3) -> torch.Tensor:
    return torch.arange(batch) % 7


# -- patches and places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "channels", "size", "patch"), [(2, 3, 12, 4), (1, 1, 7, 7), (3, 2, 5, 1), (0, 1, 4, 2)]
)
def test_patches_are_what_a_convolution_sees(batch, channels, size, patch):
    pictures = torch.randn(batch, channels, size, size)
    assert torch.equal(cut(pictures, patch), F.unfold(pictures, patch, stride=patch).transpose(1, 2))


def test_the_embedding_is_a_strided_convolution_of_unit_size():
    model = VisionTransformer(VisionConfig(**SIZE | {"dim": 512, "heads": 4, "pooling": "mean"})).double()
    pictures = images(64, torch.float64)
    kernel = model.embedding.weight.view(512, 3, 4, 4) / math.sqrt(PIXELS)
    expected = F.conv2d(pictures, kernel, stride=4).flatten(2).transpose(1, 2) + model.embedding.positions
    found = model.embedding(pictures)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    # Unit patches at unit places. Half a million numbers, of which 9 · 512 are new in each picture: far within 2 %.
    assert (found - model.embedding.positions).pow(2).mean().sqrt().item() == pytest.approx(1.0, rel=0.02)
    assert model.embedding.positions.pow(2).mean().sqrt().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_patches_that_move_with_their_places_change_nothing(name, pooling):
    model = VisionTransformer(VisionConfig(scheme=name, pooling=pooling, **SIZE)).double()
    patches, order = cut(images(dtype=torch.float64), 4), torch.randperm(9)
    first = int(pooling == "class")

    def states(patches: torch.Tensor) -> torch.Tensor:
        return model.stack(model.embedding.place(patches), causal=False)

    before = states(patches)
    with torch.no_grad():
        moved = model.embedding.positions[first:][order].clone()
        model.embedding.positions[first:] = moved
    after = states(patches[:, order])
    # Sums over nine keys in another order: a few roundings of 2^-53 at every block.
    scale = before.abs().max().item()
    assert torch.allclose(after[:, first:], before[:, first:][:, order], rtol=0, atol=1e-12 * scale)
    assert torch.allclose(after[:, :first], before[:, :first], rtol=0, atol=1e-12 * scale)
    # Without their places they would be a bag: the order of patches alone matters.
    assert not torch.allclose(states(patches)[:, first:], before[:, first:], atol=1e-6 * scale)


def test_the_head_reads_the_class_token_or_the_mean():
    torch.manual_seed(1)
    model = VisionTransformer(VisionConfig(pooling="class", **SIZE))
    hidden = model.stack(model.embedding(images()), causal=False)
    assert hidden.shape == (3, 10, 32)
    assert torch.equal(model.features(images()), hidden[:, 0])
    mean = VisionTransformer(VisionConfig(pooling="mean", **SIZE))
    assert mean.embedding.class_token is None
    assert torch.equal(mean.features(images()), mean.stack(mean.embedding(images()), causal=False).mean(1))
    assert model(images()).shape == (3, 7)


def test_every_patch_reaches_the_answer(name):
    # `none` at its own small init passes little on, but not nothing.
    model = VisionTransformer(VisionConfig(scheme=name, **SIZE)).double()
    one = images(1, torch.float64)
    for patch in range(9):
        two = one.clone()
        two[:, :, 4 * (patch // 3) : 4 * (patch // 3) + 4, 4 * (patch % 3) : 4 * (patch % 3) + 4] += 1.0
        assert not torch.equal(model(one), model(two)), patch


# -- the scheme's rules ----------------------------------------------------------------------------------------------


def test_every_parameter_has_a_role_and_a_group(name):
    model = VisionTransformer(VisionConfig(scheme=name, **SIZE))
    roles = {role.name: role.role for role in model.find_roles() if "stack" not in role.name}
    named = {"embedding.weight": "patch", "embedding.positions": "position", "embedding.class_token": "position"}
    assert named.items() <= roles.items()
    assert roles["head.weight"] == "head"
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())


def test_ngpt_keeps_what_is_in_front_on_the_sphere():
    model = VisionTransformer(VisionConfig(scheme="ngpt", **SIZE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.after_step()
    front = model.embedding
    # fp32: a sum of 32 squares and a root are good to a few 2^-24.
    for lengths in (front.weight.norm(dim=0), front.positions.norm(dim=1), front.class_token.norm(dim=1)):
        assert torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=1e-6)
    assert torch.allclose(model.head.weight.norm(dim=1), torch.ones(7), rtol=0, atol=1e-6)


def test_meta_build_equals_direct_build(name):
    config = VisionConfig(scheme=name, **SIZE)
    torch.manual_seed(11)
    direct = VisionTransformer(config)
    late = config.build(device="meta")
    assert all(p.is_meta for p in late.parameters())
    torch.manual_seed(11)
    late.to_empty(device="cpu").init_()
    assert torch.equal(direct(images()), late(images()))


@parametrize("depth", [2, 36, 64], quick=[2])
def test_any_depth_has_finite_gradients(name, depth):
    model = VisionTransformer(VisionConfig(**SIZE | {"scheme": name, "depth": depth}))
    model.loss(images(), labels()).backward()
    for parameter, gradient in ((n, p.grad) for n, p in model.named_parameters()):
        assert gradient is not None, parameter
        assert gradient.isfinite().all(), parameter
    assert model.embedding.weight.grad.any()


def test_thirty_six_layers_of_a_few_schemes():
    for scheme in ("geonorm", "ngpt", "dual", "spannorm"):
        model = VisionTransformer(VisionConfig(**SIZE | {"scheme": scheme, "depth": 36}))
        model.loss(images(), labels()).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters()), scheme


def test_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = VisionTransformer(VisionConfig(checkpointing=checkpointing, **SIZE))
        model.loss(images(), labels()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("stream", ["fp32", "bf16"])
def test_half_precision(name, stream):
    model = VisionTransformer(VisionConfig(scheme=name, stream=stream, **SIZE)).bfloat16()
    seen: set[torch.dtype] = set()
    for layer in model.stack.layers:
        layer.register_forward_hook(lambda _module, _args, state: seen.add(state.dtype))
    loss = model.loss(images(), labels())
    loss.backward()
    assert loss.isfinite()
    assert seen == {{"fp32": torch.float32, "bf16": torch.bfloat16}[stream]}


def test_black_bright_and_broken_images():
    model = VisionTransformer(VisionConfig(scheme="peri", **SIZE))
    for picture in (torch.zeros(2, 3, 12, 12), 1e4 * images(2)):
        loss = model.loss(picture, labels(2))
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    spoilt = images(2)
    spoilt[0, 0, 0, 0] = math.nan
    assert model(spoilt)[0].isnan().all()
    assert model(spoilt)[1].isfinite().all()


@pytest.mark.full
def test_compiled_it_is_the_same(no_default_device):
    model = VisionTransformer(VisionConfig(scheme="geonorm", **SIZE))
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(images(), labels()), model.loss(images(), labels()), rtol=1e-5)


# -- loss, sizes, work -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model = VisionTransformer(VisionConfig(scheme="ngpt", **SIZE)).double()
    pictures, targets = images(5, torch.float64), labels(5)
    targets[3] = -100
    logits = model(pictures)
    expected = F.cross_entropy(logits, targets)
    assert torch.allclose(model.loss(pictures, targets), expected, rtol=1e-12)
    loss, accuracy = model.loss_and_accuracy(pictures, targets)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert accuracy == (logits.argmax(-1) == targets).sum() / 4
    z = torch.logsumexp(logits, -1)[targets != -100].square().mean()
    assert torch.allclose(model.loss(pictures, targets, z_loss=0.1), expected + 0.1 * z, rtol=1e-12)
    assert model.loss_and_accuracy(pictures, torch.full_like(targets, -100)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_counts_and_work_by_hand(pooling):
    config = VisionConfig(pooling=pooling, **SIZE)
    d, L, h, T = 32, 2, 48, 9 + (pooling == "class")
    block, gains = 4 * d * d + 3 * d * h, (2 * L + 1) * d
    front = d * PIXELS + T * d + (d if pooling == "class" else 0)
    assert config.num_params() == front + L * block + gains + 7 * d
    # A class token has no pixels, the head reads one state an image, positions are added.
    an_image = T * (L * block + gains) + 9 * d * PIXELS + 7 * d
    assert config.flops_per_token() == pytest.approx(6 * an_image / T + 12 * L * d * T, abs=6)


def test_experts_and_parallel_blocks():
    model = VisionTransformer(VisionConfig(experts=4, top_k=2, topology="parallel", **SIZE))
    loss = model.loss(images(), labels())
    assert loss > model.cross_entropy(images(), labels())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("preset", "millions"), [("vit-s", 22), ("vit-b", 86)])
def test_presets_have_the_size_they_are_named_after(preset, millions):
    assert VisionConfig.preset(preset, mlp="gelu").num_params() / 1e6 == pytest.approx(millions, abs=1)


def test_memory_is_estimated_without_being_taken():
    config = VisionConfig(**SIZE)
    model, kept = VisionTransformer(config), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(images(8), labels(8))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert loss.isfinite()
    assert config.memory(8, precision="fp32").activations == pytest.approx(measured, rel=0.03)
    with pytest.raises(NormLabError, match="an image is a sequence of 10 tokens, not of 64"):
        config.memory(8, 64)


# -- configuration ---------------------------------------------------------------------------------------------------


def test_config_survives_json(name):
    config = VisionConfig(scheme=name, **SIZE)
    assert VisionConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": 5}, "patch 5 does not divide image_size 12; try patch 4"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"pooling": "max"}, "unknown pooling 'max'"),
        ({"scheme": "peery"}, "did you mean 'peri'"),
        ({"scheme": "ngpt", "mlp": "gelu"}, "gate-scale"),
    ],
    ids=str,
)
def test_bad_configurations_get_one_clear_line(change, message):
    with pytest.raises(NormLabError, match=message) as caught:
        VisionTransformer(VisionConfig(**SIZE | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2, 3, 12), torch.zeros(2, 1, 12, 12), torch.zeros(2, 3, 12, 12, dtype=torch.uint8)],
    ids=["flat", "grey", "bytes"],
)
def test_other_images_get_one_clear_line(wrong):
    with pytest.raises(NormLabError, match=r"expected images as floats \(batch, 3, 12, 12\), got"):
        VisionTransformer(VisionConfig(**SIZE))(wrong)
