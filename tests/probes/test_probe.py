"""A look at a live model: the right numbers, and nothing of it left behind."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from normlab import NormLabError
from normlab.probes import measures
from normlab.probes.probe import measure, probe
from normlab.probes.profile import Profile
from tests.probes.loops import Block, Tower, decoder, hooks_on, loss_of, same, states_of, text


@pytest.mark.parametrize("scheme", ["pre", "post", "peri(step=0.1)", "none", "dual", "geonorm", "ngpt"])
def test_every_boundary_against_plain_states(scheme):
    model, batch = decoder(scheme), text()
    profile = measure(model, batch, loss_of)
    with states_of(model) as states:
        model.loss(*batch).backward()
    hidden = [model.stack.hidden(state.detach()) for state in states]
    for place, (state, h) in enumerate(zip(states, hidden, strict=True)):
        assert state.grad is not None
        assert profile.rms[place] == pytest.approx(h.square().mean().sqrt().item(), rel=1e-6)
        gradient = float(model.stack.hidden(state.grad).double().norm())
        # Two runs of the same fp32 sums, the norm itself in fp32: some hundred roundings at most.
        assert profile.grad_h[place] == pytest.approx(gradient, rel=1e-5)
    for place in range(3):
        step = hidden[place + 1] - hidden[place]
        assert profile.branch_rms[place] == pytest.approx(float(step.square().mean().sqrt()), rel=1e-5)
        expected = measures.block(hidden[place], hidden[place + 1])
        assert profile.absorb_bf16[place] == pytest.approx(float(expected["absorb_bf16"]))
        norms = [p.grad.norm() for p in model.stack.layers[place].parameters() if p.grad is not None]
        assert profile.grad_w[place] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
    assert profile.loss == pytest.approx(model.loss(*batch).item(), rel=1e-6)
    assert profile.nan_first is None
    assert not profile.unfit
    assert None not in profile.attn_entropy
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict(), allow_nan=False))) == profile


def test_half_precision_is_measured_in_single():
    model = decoder("none", bias=True)
    with torch.no_grad():
        model.embedding.weight.mul_(3000.0)
    expected = model.embedding(text()[0]).square().mean().sqrt()
    profile = measure(model.to(torch.float16), text(), lambda model, batch: model(batch[0]).float().square().mean())
    # Rounding the table to 11 bits moves no entry by more than 2^-11; squares of it overflow fp16.
    assert expected > 255
    assert profile.rms[0] == pytest.approx(expected.item(), rel=2**-10)
    bf16 = measure(decoder().bfloat16(), text(), loss_of)
    wide = measure(decoder(), text(), loss_of)
    assert bf16.rms == pytest.approx(wide.rms, rel=0.05)


def test_fused_and_unfused_attention_have_the_same_statistics():
    model, batch = decoder(), text()
    fused = measure(model, batch, loss_of)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = measure(model, batch, loss_of)
    same(fused, unfused, 1e-4)


def test_attention_belongs_to_the_block_that_called_it():
    model = decoder()
    attention = model.stack.layers[1].branches[0]
    attention.softmax_scale = 1e4
    profile = measure(model, text(), loss_of)
    entropy, sharp = profile.attn_entropy, profile.logit_max
    assert None not in entropy
    assert entropy[1] < 0.1 < min(entropy[0], entropy[2])
    assert sharp[1] > 100 * max(sharp[0], sharp[2])


@pytest.mark.parametrize("length", [2, 4, 8])
def test_a_softmax_over_residual_streams_is_no_attention(length, monkeypatch):
    """mhc mixes its streams by a softmax of its own for each token, which its kernel on a GPU does not show either."""
    # Of four streams, so that a text has fewer tokens, as many, or more.
    model, batch = decoder("mhc"), text(length=length)
    # As many heads as tokens: the scores of attention have as many keys as tokens, too.
    many = decoder("mhc", heads=length, kv_heads=length, dim=64)
    found, found_of_many = (measure(one, batch, loss_of) for one in (model, many))
    monkeypatch.setattr("normlab.kernels.sinkhorn._sinkhorn", _sinkhorn_without_softmax)
    for profile, one in ((found, model), (found_of_many, many)):
        expected = measure(one, batch, loss_of)
        assert None not in profile.attn_entropy
        for name in ("attn_entropy", "sink", "theta_p", "logit_max"):
            assert getattr(profile, name) == pytest.approx(getattr(expected, name), rel=1e-5), name


def test_as_many_heads_as_samples_before_tokens_are_attention():
    """torch's own layers put tokens first: where others have tokens they have the batch, here as large as the heads."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    profile = measure(model, torch.randn(3, 4, 16), lambda model, batch: model(batch).square().mean())
    assert None not in profile.attn_entropy


def test_as_many_heads_as_tokens_that_look_at_fewer_keys_are_attention():
    class Cross(nn.Module):
        def __init__(self, keys: torch.Tensor):
            super().__init__()
            self.attention, self.keys = nn.MultiheadAttention(32, 8, batch_first=True), keys

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x, self.keys, self.keys, need_weights=False)[0]

    model = Tower([Cross(torch.randn(2, 4, 32)) for _ in range(3)], dim=32)
    profile = measure(model, torch.randn(2, 8, 32), lambda model, batch: model(batch))
    assert None not in profile.attn_entropy


def _sinkhorn_without_softmax(logits: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    matrix = (logits - logits.logsumexp(-1, keepdim=True)).exp() + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def test_the_model_is_as_it_was():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            self.count += 1
            return self.drop(super().forward(x))

    model = Tower([Counting() for _ in range(3)]).train()
    model.layers[1].eval()
    x = torch.randn(2, 5, 8)
    model(x).backward()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    random, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    first = measure(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert torch.equal(parameter.grad, copies[name])
    assert hooks_on(model) == 0
    assert measure(model, x) == first


def test_gradients_stay_if_asked_for():
    model = Tower()
    x = torch.randn(2, 5, 8)
    measure(model, x, keep_grads=True)
    kept = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("probed", [True, False])
def test_a_probe_does_not_change_the_step(probed):
    def train(watched: bool) -> list[torch.Tensor]:
        model = decoder()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            with probe(model, step=step, active=watched) if probed else nullcontext():
                optimiser.zero_grad()
                model.loss(*text(seed=step)).backward()
                optimiser.step()
        return [torch.rand(1), *model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train(True), train(False), strict=True))


def test_an_idle_probe_installs_nothing():
    model, attention = decoder(), F.scaled_dot_product_attention
    with probe(model, active=False) as look:
        assert hooks_on(model) == 0
        assert F.scaled_dot_product_attention is attention
        look.record(loss=torch.ones(()))
    assert look.profiles == {}
    with pytest.raises(NormLabError, match="active=True"):
        _ = look.profile


def test_a_step_that_raises_keeps_its_error_and_loses_the_hooks():
    model, attention = decoder(), F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), probe(model):
        model.loss(*text()).backward(gradient=torch.tensor(1 / 0))
    assert hooks_on(model) == 0
    assert F.scaled_dot_product_attention is attention


def test_there_is_no_profile_before_the_end():
    model = decoder()
    with probe(model) as look:
        with pytest.raises(NormLabError, match="after the with block"):
            _ = look.profile
        model.loss(*text()).backward()
    assert look.profile.depth == 3


class Waiting(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "equal.default", "is_nonzero", "masked_select")
        self.count += any(wait in str(func) for wait in waits)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_during_the_step():
    model, batch = decoder(), text()
    model.loss(*batch).backward()
    with Waiting() as alone:
        model.loss(*batch).backward()
    with probe(model) as look, Waiting() as probed:
        model.loss(*batch).backward()
    assert look.profile.depth == 3
    assert probed.count == alone.count
