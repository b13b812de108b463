"""Planted faults are named with their block, module, head and step; healthy models raise no alarm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normlab
from normlab import Decoder, DecoderConfig
from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.verdict import Verdict
from normlab.checks.ladder_records import Ladder
from normlab.probes.probe import measure, measure_stacks, probe
from normlab.probes.profile import Profile
from tests.matrix import parametrize, quick_if
from tests.targets.tiny import MODELS, batch_for, hugging_face

DEPTH = 8
SIZE = {"depth": DEPTH, "dim": 32, "heads": 4, "vocab_size": 61, "max_length": 64, "hidden": 48, "tied": False}
SCHEMES = normlab.list_schemes()
HEALTHY = [scheme for scheme in SCHEMES if scheme != "none"]
PARTS = {"attention": ("branches.0.out.weight", 0), "mlp": ("branches.1.down.weight", 1)}


def build(scheme: str, seed: int = 0, **options) -> Decoder:
    """Matrices of gain one and embeddings of size one, so that every branch counts."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(scheme=scheme, **{**SIZE, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Matrices of the scheme's own are no branches: those that mix streams start as the identity.
            if parameter.ndim == 2 and scheme != "ngpt" and ".steps." not in name:
                parameter.normal_(0.0, 1.0 if name.startswith("embedding") else parameter.shape[1] ** -0.5)
    return model


def text(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (4, 25), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def look(model: nn.Module, **options) -> Profile:
    return measure(model, text(), lambda model, batch: model.loss(*batch), **options)


def verdict(name: str, profile: Profile) -> Verdict:
    return next(found for found in judge_ladder(Ladder((profile,))) if found.name == name)


def train(model: Decoder, steps: int = 10) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimiser.zero_grad()
        model.loss(*text(seed=step)).backward()
        optimiser.step()
        model.after_step()


# -- one block's output matrix x50 -----------------------------------------------------------------------------------


@quick_if(lambda scheme, part: (part == "mlp") == (scheme in ("pre", "geonorm", "hybrid")))
@parametrize("scheme", SCHEMES, quick=("pre", "post", "geonorm", "ngpt", "hybrid"))
@pytest.mark.parametrize("part", PARTS)
@parametrize("block", [5, 0, DEPTH - 1], quick=[5])
def test_a_matrix_that_is_fifty_times_too_large_is_named_with_its_block(scheme, part, block):
    name, _ = PARTS[part]
    model = build(scheme)
    with torch.no_grad():
        model.stack.layers[block].get_parameter(name).mul_(50.0)
    found = verdict("uneven", look(model))
    assert (found.level, found.layers) == ("warn", (block,)), found.words
    assert name in found.words
    assert found.value == pytest.approx(50.0, rel=0.2)
    assert found.words.endswith(f"block {block}")


@quick_if(lambda scheme, part: (part == "mlp") == (scheme == "pre"))
@parametrize("scheme", ["pre", "post", "deepnorm", "mix", "layerscale", "keel"], quick=("pre", "post"))
@pytest.mark.parametrize("part", PARTS)
@parametrize("block", [4, 5, DEPTH - 1], quick=(4, DEPTH - 1))
def test_a_branch_that_returns_fifty_times_too_much_is_named_without_a_look_at_weights(scheme, part, block):
    model = build(scheme)
    model.stack.layers[block].branches[PARTS[part][1]].register_forward_hook(lambda _m, _a, output: 50.0 * output)
    found = verdict("uneven", look(model))
    assert (found.level, found.layers) == ("warn", (block,)), found.words


@parametrize("scheme", HEALTHY, quick=("pre", "post", "geonorm"))
@parametrize("seed", [0, 1, 2], quick=[0])
def test_healthy_schemes_are_even_before_and_after_a_burst(scheme, seed):
    model = build(scheme, seed)
    for steps in (0, 10):
        train(model, steps)
        profile = look(model, step=steps)
        found = verdict("uneven", profile)
        # The limit is 10: healthy schemes stay far from it.
        assert found.value is not None
        assert found.value < 5.0, found.words
        assert verdict("attention", profile).level == "ok"


@parametrize("name", MODELS, quick=("gpt2", "bert", "vit"))
def test_other_peoples_models_are_even_at_their_own_initialisation(name):
    depth = {"gpt2": {"n_layer": 8}, "t5": {"num_layers": 8, "num_decoder_layers": 8}}
    model = hugging_face(name, **depth.get(name, {"num_hidden_layers": 8}))
    for profile in measure_stacks(model, batch_for(name)).values():
        for kind in ("uneven", "attention"):
            found = verdict(kind, profile)
            assert found.level == "ok", found.words


@pytest.mark.parametrize(
    ("name", "path"),
    [("gpt2", "mlp.c_proj.weight"), ("llama", "mlp.down_proj.weight"), ("bert", "output.dense.weight"),
     ("gemma2", "self_attn.o_proj.weight"), ("olmo2", "mlp.down_proj.weight")],
)  # fmt: skip
def test_a_matrix_of_other_peoples_models_is_named_by_its_own_path(name, path):
    model = hugging_face(name, **({"n_layer": 6} if name == "gpt2" else {"num_hidden_layers": 6}))
    parameters = [p for full, p in model.named_parameters() if full.endswith(f".3.{path}")]
    with torch.no_grad():
        parameters[0].mul_(50.0)
    found = verdict("uneven", measure(model, batch_for(name)))
    assert found.layers == (3,)
    assert path in found.words


# -- a collapsed head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("scheme", ["pre", "post", "peri"])
def test_a_collapsed_head_is_named_with_its_block(scheme, heads):
    model = build(scheme, dim=64, heads=heads)
    block, head, width = 5, heads - 2, 64 // heads
    with torch.no_grad():
        # Queries of one head a thousand times as long: its softmax sees the nearest key alone.
        model.stack.layers[block].branches[0].qkv.weight[head * width : (head + 1) * width].mul_(1000.0)
    profile = look(model)
    found = verdict("attention", profile)
    assert (found.finding, found.level, found.layers) == ("low entropy", "warn", (block,)), found.words
    assert found.words.endswith(f"; block {block} (block {block}: head {head})")
    low = [(b, h) for b, row in enumerate(profile.attn_heads) for h, entropy in enumerate(row) if entropy < 0.05]
    assert low == [(block, head)]


def test_sharp_heads_that_are_not_alone_are_no_fault():
    entropies = [[0.04, *[0.1 + 0.05 * head for head in range(15)]] for _ in range(DEPTH)]
    shares = [1 / 16] * DEPTH
    profile = Profile(boundaries=DEPTH + 1, attn_heads=entropies, attn_entropy_low_share=shares)
    assert verdict("attention", profile).level == "ok"
    entropies[2][0] = entropies[4][1] = entropies[4][3] = 0.01
    gap = [[max(x, 0.3) if x > 0.04 else x for x in row] for row in entropies]
    gap = [[0.5, *row[1:]] if place not in (2,) else row for place, row in enumerate(gap)]
    found = verdict("attention", Profile(boundaries=DEPTH + 1, attn_heads=gap, attn_entropy_low_share=shares))
    assert found.layers == (2, 4)
    assert found.words.startswith("3 heads see one key, entropy 0.01 (0.05 is the least) and above 0.30")
    assert found.words.endswith("(block 2: head 0; block 4: heads 1, 3)")


# -- one NaN at step 7 -----------------------------------------------------------------------------------------------


@parametrize("scheme", HEALTHY, quick=("post", "geonorm"))
def test_a_nan_at_step_seven_is_named_with_its_module_and_step(scheme):
    model = build(scheme)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    down = model.stack.layers[4].branches[1].down
    found = []
    for step in range(9):
        planted = down.register_forward_hook(lambda _m, _a, output: output * math.nan) if step == 7 else None
        with probe(model, step=step) as watched:
            optimiser.zero_grad()
            loss = model.loss(*text(seed=step))
            watched.record(loss=loss)
            loss.backward()
            if step != 7:
                optimiser.step()
        if planted is not None:
            planted.remove()
        found.append(watched.profile)
    names = [profile.nan_first for profile in found]
    assert names == [None] * 7 + ["stack.layers.4.branches.1.down at step 7", None]
    assert found[7].first_broken == 5
    forward = verdict("forward", found[7])
    assert (forward.finding, forward.level, forward.layers) == ("exploding", "fail", (4,))
    assert "stack.layers.4.branches.1.down at step 7" in forward.words
