"""Structural tests raise no alarm on healthy designs, and measure what they say they do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import normlab
from normlab.checks.judge.structure import leaks, structure, untrained
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.structure.gradients import LAST_STEPS, GradientTrace
from normlab.checks.structure.inspect import Structure, inspect_structure
from normlab.checks.structure.scaling import block_scaling
from normlab.probes.blocks import find_stacks
from normlab.probes.replay import capture
from normlab.probes.untouched import at_rest
from normlab.targets import resolve
from tests.checks import broken
from tests.matrix import parametrize
from tests.targets.tiny import MODELS, batch_for, hugging_face

LIMITS = Thresholds()
SIZE = {"length": 16, "batch_size": 4}
SKIP_GAINS = {"highway": (1.0 - torch.sigmoid(torch.tensor(-2.0)).item()) ** 2, "lambdas": 1.15}
"""Schemes whose skips multiply the state by design, as their cards say, with the least factor of the first block."""
HEALTHY = [scheme for scheme in normlab.list_schemes() if scheme not in ("none", *SKIP_GAINS)]


def inspected(target, **build) -> list[Structure]:
    model = target.build(**build)
    model.train()
    return inspect_structure(target, model, LIMITS)


@parametrize("scheme", HEALTHY, quick=["pre", "post", "peri", "geonorm", "ngpt", "hybrid", "dual", "mhc"])
def test_healthy_schemes_have_norms_skips_and_no_leaks(scheme):
    (found,) = inspected(resolve(scheme, width=32, **SIZE), depth=4)
    assert not found.missing
    assert not found.cuts
    assert structure(found, LIMITS).finding == "fine", structure(found, LIMITS).words
    assert leaks(found, LIMITS).finding == "fine"
    # Nothing that a later token or another sample holds gets through, not even rounding.
    assert found.future.share == found.batch.share == 0.0


@pytest.mark.parametrize(("scheme", "least"), SKIP_GAINS.items())
def test_a_skip_that_multiplies_the_state_by_design_is_told_of(scheme, least):
    (found,) = inspected(resolve(scheme, width=32, **SIZE), depth=4)
    verdict = structure(found, LIMITS)
    # Over four blocks it is borne.
    assert (verdict.finding, verdict.level) == ("skip gain", "warn")
    # λ_0·x₀ adds at most 0.2 of the state where the state still is x₀.
    assert least - 3e-3 < found.scalings[0].gain < least + 0.2
    assert not found.missing
    assert not found.cuts


@pytest.mark.parametrize("scheme", ["hc", "hc(dynamic=False)", "lambdas", "gated", "mhc"])
def test_a_skip_that_mixes_streams_is_no_missing_norm(scheme):
    """With coefficients that are far from where they start."""
    target = resolve(scheme, width=32, **SIZE)
    model = target.build(depth=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".steps." in name:
                parameter += 0.3 * torch.randn_like(parameter)
    (found,) = inspect_structure(target, model.train(), LIMITS)
    assert all(one.has_norm(LIMITS.norm_exponent) for one in found.scalings)


def test_none_has_no_norm():
    (found,) = inspected(resolve("none", width=32, **SIZE), depth=4)
    assert structure(found, LIMITS).finding == "no norm"


@parametrize("name", MODELS, quick=["gpt2", "bert", "vit", "t5", "gemma2"])
def test_published_models_have_norms_skips_and_no_leaks(name):
    model, batch = hugging_face(name), batch_for(name, batch=4)
    target = resolve(model, batch=batch)
    for found in inspected(target):
        assert not found.missing
        assert not found.cuts
        assert structure(found, LIMITS).finding == "fine", structure(found, LIMITS).words
    first = inspected(target)[0]
    assert leaks(first, LIMITS).finding == "fine", leaks(first, LIMITS).words
    # Encoders, pictures and encoders with decoders see all of their input.
    assert (first.future is None) == (name in ("bert", "vit", "t5"))


@pytest.mark.parametrize("skip", [0.5, 0.9, 1.0, 1.5])
def test_the_gain_of_a_skip_is_its_square_over_two_branches(skip):
    torch.manual_seed(0)
    model = broken.Model(2, 32, broken.Design(skip=skip))
    stack, ids = find_stacks(model)[0], torch.randint(0, 64, (4, 16))
    with at_rest(model):
        calls = capture(stack, stack.blocks, lambda: model(ids))
        found = [block_scaling(call, LIMITS.norm_exponent) for call in calls]
    # What the branches add along the state, at most 1 + skip, over a state of RMS 1000.
    assert all(one.gain == pytest.approx(skip**2, abs=3e-3) for one in found)
    assert all(abs(one.exponent) < 0.05 for one in found)


class Experts(nn.Module):
    """Two experts of limited capacity: tokens that come late find the first one full."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = self.router(flat).argmax(-1) == 0
        # The best are kept, whatever their place: later tokens and other samples push a token out.
        score = self.router(flat)[:, 0].masked_fill(~first, -torch.inf)
        kept = torch.zeros_like(first)
        kept[score.topk(len(flat) // 4).indices] = True
        both = [expert(flat) for expert in self.experts]
        return torch.where((kept & first)[:, None], both[0], both[1]).view_as(x)


def test_experts_with_a_capacity_raise_no_alarm():
    torch.manual_seed(0)
    target = resolve(lambda depth, width: _with_mlp(depth, width, Experts), depth=4, width=32, **SIZE)
    assert leaks(inspected(target)[0], LIMITS).finding == "fine"


def _with_mlp(depth: int, width: int, make) -> nn.Module:
    model = broken.healthy(depth, width)
    for block in model.blocks:
        block.mlp = make(width)
    return model


ENCODER = broken.Design(attention=partial(broken.Attention, causal=False))


def test_an_encoder_may_see_everything():
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).logsumexp(-1).mean()

    ids = torch.randint(0, 64, (4, 16))
    own_batch = resolve(broken.Model(4, 32, ENCODER), batch=ids, loss_fn=loss)
    assert leaks(inspected(own_batch)[0], LIMITS).finding == "fine"
    # Asked to predict the next token, which it can read, it is told so: nobody said that it is an encoder.
    guessed = leaks(inspected(resolve(broken.Model(4, 32, ENCODER), **SIZE))[0], LIMITS)
    assert (guessed.finding, guessed.level) == ("sees the future", "warn")
    assert "right for an encoder" in guessed.words


class OverBatch(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(("causal", "level"), [(True, "fail"), (False, "warn")])
def test_batch_norm_warns_in_an_encoder_and_fails_in_a_decoder(causal, level):
    attention = partial(broken.Attention, causal=causal)
    model = broken.Model(4, 32, broken.Design(norm=OverBatch, attention=attention))
    # Its own class is not torch's: the name is what tells.
    ids = torch.randint(0, 64, (4, 16))
    target = resolve(model, batch=ids, loss_fn=lambda model, ids: model(ids).logsumexp(-1).mean())
    found = leaks(inspected(target)[0], LIMITS)
    assert found.finding in ("sees the future", "mixes samples")
    assert found.level == level


def test_a_parameter_is_trained_if_any_step_gave_it_a_gradient():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    trace = GradientTrace()
    for step in range(2 * LAST_STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        for parameter in model["a"].parameters():
            parameter.grad = torch.full_like(parameter, float(step % 2))
        for parameter in model["b"].parameters():
            parameter.grad = torch.full_like(parameter, float(step == 0))
        largest = trace.take(model)
        assert largest == float(step % 2 or step == 0)
    assert trace.never == ("c.weight", "c.bias")
    assert trace.lost == ("b.weight", "b.bias")


def test_what_is_idle_outside_of_blocks_warns():
    model = broken.healthy(4, 32)
    found = Structure(find_stacks(model)[0])
    trace = GradientTrace(last={"blocks.0.mlp.up.weight": 4, "spare.weight": -1}, steps=5)
    idle = untrained(found, trace, has_head=True)
    assert (idle.finding, idle.level, idle.module, idle.value) == ("untrained", "warn", "spare", 1.0)
    # Without a head of the model's own nothing reads it.
    assert untrained(found, trace, has_head=False).level == "ok"


class EntryNorm(broken.Model):
    """The first block has no norm on its attention, as in ModernBERT: there may be one on the embeddings."""

    def __init__(self, depth: int, width: int, entry: nn.Module):
        super().__init__(depth, width, broken.HEALTHY)
        self.blocks[0].attention_norm, self.entry = nn.Identity(), entry

    def forward(self, ids: Tensor) -> Tensor:
        x = self.entry(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("entry", "finding"), [(broken.Norm, "fine"), (lambda _: nn.Identity(), "no norm")])
def test_a_first_block_may_rely_on_a_norm_of_the_embeddings(entry, finding):
    found = structure(inspected(resolve(EntryNorm(4, 32, entry(32)), **SIZE))[0], LIMITS)
    assert (found.finding, found.layers) == (finding, () if finding == "fine" else (0,))


def test_a_norm_of_the_embeddings_is_no_norm_of_later_blocks():
    model = EntryNorm(4, 32, broken.Norm(32))
    model.blocks[2].mlp_norm = nn.Identity()
    assert structure(inspected(resolve(model, **SIZE))[0], LIMITS).layers == (0, 2)


@pytest.mark.parametrize("scheme", ["pre", "post", "peri", "output", "hc"])
def test_an_epsilon_above_the_state_is_named_wherever_the_norm_stands(scheme):
    (found,) = inspected(resolve(f"{scheme}(eps=1000.0)", width=32, **SIZE), depth=4)
    verdict = structure(found, LIMITS)
    assert (verdict.finding, verdict.level) == ("norm off", "fail"), verdict.words
    assert verdict.layers == (0, 1, 2, 3)
