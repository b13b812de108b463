"""Profiles against what the model's own states say, and that nothing of them remains."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import normlab
from normlab import Decoder, DecoderConfig
from normlab.train.monitor.profile import RANKED, profile
from normlab.utils.host_copy import HostCopy

SIZE = {"depth": 3, "dim": 32, "heads": 4, "vocab_size": 61, "max_length": 64}
EXPERTS = {"experts": 4, "top_k": 2}


def batch(rows=3, length=10):
    tokens = torch.randint(0, 61, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def mean_cosine(state):
    """Over all pairs of different tokens of a sequence, one by one."""
    units = F.normalize(state, dim=-1)
    pairs = [row[i] @ row[j] for row in units for i in range(len(row)) for j in range(len(row)) if i != j]
    return float(torch.stack(pairs).mean())


def effective_rank(state):
    """From the singular values of all tokens, not from a Gram matrix."""
    share = torch.linalg.svdvals(state.flatten(0, 1)).square()
    share = share / share.sum()
    return float(torch.exp(-(share * share.log()).sum()))


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_every_scheme_has_a_profile(name):
    found = profile(Decoder(DecoderConfig(scheme=name, **SIZE)), *batch())
    assert found["layers"] == [0, 1, 2, 3]
    assert all(value > 0 for key in ("hidden_rms", "grad_norm") for value in found[key])
    assert found["angular_speed"][0] is None
    assert all(0 < angle < math.pi for angle in found["angular_speed"][1:])
    assert all(value > 0 for value in found["update_ms"][1:])
    assert all(-1 <= value <= 1 for value in found["token_cosine"])
    assert all(1 <= value <= 30 for value in found["effective_rank"])


@pytest.mark.parametrize("options", [{}, {"checkpointing": True}, EXPERTS], ids=["plain", "checkpointing", "experts"])
def test_figures_are_those_of_the_states(options):
    model = Decoder(DecoderConfig(scheme="pre", **SIZE, **options)).double()
    tokens, targets = batch()
    targets = targets.clone()
    targets[:, ::3] = -100
    states = [model.embedding(tokens)]
    with torch.no_grad():
        handles = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in model.stack.layers]
        model(tokens)
        for handle in handles:
            handle.remove()
    found = profile(model, tokens, targets)
    states = [state.detach() for state in states]
    rms = [float(state.square().mean().sqrt()) for state in states]
    assert found["hidden_rms"] == pytest.approx(rms, rel=1e-12)
    updates = [float((b - a).square().mean()) for a, b in pairwise(states)]
    assert found["update_ms"][0] is None
    assert found["update_ms"][1:] == pytest.approx(updates, rel=1e-12)
    assert found["token_cosine"] == pytest.approx([mean_cosine(state) for state in states], rel=1e-9)
    # Eigenvalues of a Gram matrix in fp32: an error of 2^-24 of the largest, in each of at most 30.
    assert found["effective_rank"] == pytest.approx([effective_rank(state) for state in states], rel=1e-4)
    cosines = [torch.cosine_similarity(a, b, dim=-1) for a, b in pairwise(states)]
    # acos loses half the digits near 1.
    assert found["angular_speed"][1:] == pytest.approx([float(c.acos().mean()) for c in cosines], rel=1e-6)


def test_gradients_against_finite_differences():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE)).double()
    tokens, targets = batch(1, 4)
    direction = torch.randn(1, 4, 32, dtype=torch.float64)

    def total_loss(shift):
        handle = model.stack.entry.register_forward_hook(lambda _m, _a, state: state + shift * direction)
        with torch.no_grad():
            # In float64, which the model's own loss need not be.
            value = float(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"))
        handle.remove()
        return value

    slope = (total_loss(1e-6) - total_loss(-1e-6)) / 2e-6
    states = []
    handle = model.stack.entry.register_forward_hook(lambda _m, _a, state: states.append(state))
    (grad,) = torch.autograd.grad(model.loss(tokens, targets) * targets.numel(), states)
    handle.remove()
    # The gradient itself may be one of fp32 logits.
    assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-5)
    assert profile(model, tokens, targets)["grad_norm"][0] == pytest.approx(float(grad.norm()) / 2, rel=1e-10)


def test_the_size_of_the_batch_does_not_matter():
    model = Decoder(DecoderConfig(scheme="peri", **SIZE)).double()
    tokens, targets = batch()
    once, twice = profile(model, tokens, targets), profile(model, tokens.repeat(2, 1), targets.repeat(2, 1))
    assert once["grad_norm"] == pytest.approx(twice["grad_norm"], rel=1e-10)


def test_nothing_remains():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE))
    model.loss(*batch()).backward()
    model.embedding.weight.grad = None
    before = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    random = torch.get_rng_state()
    profile(model, *batch())
    for p, known in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) == (known is None)
        assert known is None or (p.grad is known[0] and torch.equal(*known))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())


def test_it_works_without_gradients_around_it():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE))
    with torch.no_grad():
        found = profile(model, *batch())
        assert not torch.is_grad_enabled()
    assert found == profile(model, *batch())


def test_compiled_layers_run_as_they_were_written():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE))
    expected = profile(model, *batch())

    def refuse(*_):
        raise AssertionError("compiled code ran")

    for layer in model.stack.layers:
        layer.compile(backend=refuse)
    assert profile(model, *batch()) == expected
    assert all(layer._compiled_call_impl is not None for layer in model.stack.layers)


def test_what_is_not_finite_is_none():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE))
    with torch.no_grad():
        model.stack.layers[1].branches[0].out.weight[0, 0] = torch.nan
    found = profile(model, *batch())
    assert found["hidden_rms"][:2] == pytest.approx(profile(Decoder(model.config), *batch())["hidden_rms"][:2], rel=1)
    assert found["hidden_rms"][2:] == [None, None]
    assert found["angular_speed"][2:] == [None, None]
    assert found["grad_norm"] == [None] * 4


def test_numbers_come_from_the_device_once(monkeypatch):
    sent = []
    monkeypatch.setattr("normlab.probes.ledger.HostCopy", lambda values: sent.append(len(values)) or HostCopy(values))
    profile(Decoder(DecoderConfig(scheme="pre", **SIZE)), *batch())
    assert len(sent) == 1


def test_a_deep_stack_has_ranks_at_some_boundaries():
    found = profile(Decoder(DecoderConfig(scheme="pre", **(SIZE | {"depth": 40}))), *batch())
    known = [place for place, rank in enumerate(found["effective_rank"]) if rank is not None]
    assert len(known) == RANKED
    assert known[0] == 0
    assert known[-1] == 40


def test_without_targets_gradients_are_zero():
    tokens, targets = batch()
    found = profile(Decoder(DecoderConfig(scheme="pre", **SIZE)), tokens, torch.full_like(targets, -100))
    assert all(value in (0.0, None) for value in found["grad_norm"])
