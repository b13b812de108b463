"""A look at loops of all kinds: checkpointing, accumulation, shared blocks, frozen parameters, updates."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.probes.probe import measure, probe
from normlab.probes.profile import Profile
from tests.probes.loops import WITHIN_A_PASS, Block, Tower, decoder, loss_of, same, text
from tests.targets.tiny import batch_for, hugging_face


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(Tower):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

    torch.manual_seed(1)
    plain = Tower()
    model = Checkpointed()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    same(measure(model, x), measure(plain, x), 1e-6)


def test_checkpointing_of_our_decoder_and_of_hugging_face():
    same(measure(decoder(checkpointing=True), text(), loss_of), measure(decoder(), text(), loss_of), 1e-6)
    model, batch = hugging_face("llama").train(), batch_for("llama")
    expected = measure(model, batch)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        same(measure(model, batch | {"use_cache": False}), expected, 1e-6)


def test_accumulation_equals_one_large_batch():
    # 4 x 12 rows of attention: all of them are looked at in one batch and in two.
    model, (inputs, targets) = decoder(), text()
    whole = measure(model, (inputs, targets), loss_of)
    with probe(model) as look:
        for part in (slice(0, 2), slice(2, 4)):
            loss = model.loss(inputs[part], targets[part])
            look.record(loss=loss)
            (loss / 2).backward()
    same(look.profile, whole, 1e-5, but=WITHIN_A_PASS)
    batch = batch_for("gpt2", batch=4)
    theirs = hugging_face("gpt2")
    whole = measure(theirs, batch)
    with probe(theirs) as look:
        for part in (slice(0, 2), slice(2, 4)):
            (theirs(**{name: value[part] for name, value in batch.items()}).loss / 2).backward()
    same(look.profile, whole, 1e-4, but=WITHIN_A_PASS)


def test_passes_of_different_size_weigh_by_their_tokens():
    model, (inputs, targets) = decoder(), text()

    def seen(*parts: slice) -> Profile:
        model.zero_grad()
        with probe(model) as look:
            for part in parts:
                loss = F.cross_entropy(model(inputs[part]).flatten(0, 1), targets[part].flatten())
                look.record(loss=loss)
                (loss * len(inputs[part]) / len(inputs)).backward()
        return look.profile

    whole, parts = seen(slice(0, 4)), seen(slice(0, 1), slice(1, 4))
    of_states = ("rms", "mean_abs", "kurtosis", "outlier_ratio", "grad_h", "branch_ratio", "ang", "grad_w")
    of_attention = ("attn_entropy", "attn_entropy_low_share", "sink", "theta_p", "logit_max")
    for name in (*of_states, *of_attention, "loss", "logits_rms", "logsumexp"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    for heads, expected in zip(parts.attn_heads, whole.attn_heads, strict=True):
        assert heads == pytest.approx(expected, rel=1e-5)


def test_passes_are_told_apart_even_if_nobody_calls_the_owner():
    tower = Tower()
    x = torch.randn(4, 5, 8)
    whole = measure(tower, x)
    with probe(tower) as look:
        for part in (x[:2], x[2:]):
            (tower.forward(part) / 2).backward()
    same(look.profile, whole, 1e-5, but=(*WITHIN_A_PASS, "loss"))


@pytest.mark.parametrize("called", [True, False])
def test_a_shared_block_is_measured_at_every_call(called):
    class Looped(Tower):
        def forward(self, x):
            x = self.embed(x)
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return x.square().mean()

    torch.manual_seed(1)
    model = Looped([Block(), Block()])
    unrolled = Tower([model.layers[0], model.layers[1], model.layers[0], model.layers[1]])
    unrolled.embed = model.embed
    x = torch.randn(2, 5, 8)
    profile = measure(model, x, lambda model, x: model(x) if called else model.forward(x))
    assert profile.depth == 4
    same(profile, measure(unrolled, x))
    states = [model.embed(x)]
    for k in range(4):
        states.append(model.layers[k % 2](states[-1]))
    assert profile.rms == pytest.approx([h.square().mean().sqrt().item() for h in states], rel=1e-6)


def test_frozen_parameters():
    model, batch = decoder(tied=False), text()
    expected = measure(model, batch, loss_of)
    for parameter in [*model.embedding.parameters(), *model.stack.layers[0].parameters()]:
        parameter.requires_grad_(False)
    profile = measure(model, batch, loss_of)
    assert profile.grad_h == pytest.approx(expected.grad_h, rel=1e-6)
    assert profile.grad_w == [None, *expected.grad_w[1:]]
    with probe(model) as look:
        model.loss(*batch).backward()
    # A look at somebody else's step does not make it compute gradients that it had no use for.
    assert look.profile.grad_h[:2] == [None, None]
    assert look.profile.grad_h[2:] == pytest.approx(expected.grad_h[2:], rel=1e-6)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert measure(model, batch, loss_of).grad_h == pytest.approx(expected.grad_h, rel=1e-6)


def test_a_state_that_the_caller_owns_stays_a_state_without_gradient():
    tower = Tower()
    tower.embed = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 5, 8)
    assert None not in measure(tower, x).grad_h
    assert not x.requires_grad
    assert x.grad is None


def test_without_a_backward_pass_there_are_no_gradients():
    model, batch = decoder(), text()
    with torch.inference_mode(), probe(model) as look:
        model(batch[0])
    assert look.profile.grad_h == [None] * 4
    assert look.profile.grad_w == [None] * 3
    assert None not in look.profile.rms + look.profile.ang


def test_update_ratio_of_a_real_step():
    model, batch = decoder(), text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in model.stack.layers]
    with probe(model) as look:
        model.loss(*batch).backward()
        optimiser.step()
        optimiser.zero_grad()
    for place, (layer, old) in enumerate(zip(model.stack.layers, before, strict=True)):
        moved = math.hypot(*(float((p.detach() - q).norm()) for p, q in zip(layer.parameters(), old, strict=True)))
        size = math.hypot(*(float(q.norm()) for q in old))
        # All matrices here have fewer entries than are kept: nothing is estimated.
        assert look.profile.upd_ratio[place] == pytest.approx(moved / size, rel=1e-5)
    # Cleared inside the step, and measured all the same.
    assert None not in look.profile.grad_w


def test_update_ratio_of_large_matrices_is_an_estimate():
    class Wide(Block):
        def __init__(self):
            super().__init__(256)

    tower = Tower([Wide(), Wide()], dim=256)
    with probe(tower) as look:
        tower(torch.randn(1, 3, 256))
        with torch.no_grad():
            tower.layers[0].mix.weight.add_(torch.randn(256, 256) * 1e-3)
    size = math.hypot(*(p.norm().item() for p in tower.layers[0].parameters()))
    # 4096 draws of a squared Gaussian: relative error √(2/4096) = 2 %, half of it in the root; the size alike.
    assert look.profile.upd_ratio[0] == pytest.approx(256 * 1e-3 / size, rel=0.1)
    assert look.profile.upd_ratio[1] == 0.0


def test_no_step_no_update_ratio():
    assert measure(decoder(), text(), loss_of).upd_ratio == [None, None, None]


# -- number formats and shared weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaled_loss(dtype):
    model, batch = decoder(), text()
    expected = measure(model, batch, loss_of)

    def scaled(model, batch):
        with torch.autocast("cpu", dtype):
            loss = model.loss(*batch)
        return loss * 1024.0

    found = measure(model, batch, scaled)
    # Three blocks of matrix products rounded to 8 bits at least, of which errors of 2^-8 add up at random.
    assert found.rms == pytest.approx(expected.rms, rel=0.02)
    assert found.grad_h == pytest.approx([1024.0 * size for size in expected.grad_h], rel=0.1)
    assert pytest.approx(expected.G, rel=0.1) == found.G
    assert found.attn_entropy == pytest.approx(expected.attn_entropy, rel=0.02)


def test_a_matrix_that_two_blocks_share_counts_in_both():
    tower = Tower()
    tower.layers[1].mix = tower.layers[0].mix
    optimiser = torch.optim.SGD(tower.parameters(), lr=0.1)
    shared = tower.layers[0].mix.weight
    size = shared.detach().square().mean().sqrt().item()
    with probe(tower) as look:
        tower(torch.randn(2, 5, 8)).backward()
        gradient = [p.grad.norm() for p in tower.layers[0].parameters()]
        optimiser.step()
    assert look.profile.weight_rms["mix.weight"][:2] == pytest.approx([size, size], rel=1e-6)
    assert look.profile.grad_w[0] == pytest.approx(torch.stack(gradient).norm().item(), rel=1e-5)
    assert None not in look.profile.upd_ratio


def test_blocks_of_different_make_have_different_matrices():
    class Wider(Block):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(8, 8)

    tower = Tower([Block(), Wider(), Block()])
    profile = measure(tower, torch.randn(2, 5, 8), blocks="layers.*")
    assert [size is None for size in profile.weight_rms["extra.weight"]] == [True, False, True]
    assert None not in profile.weight_rms["mix.weight"]
