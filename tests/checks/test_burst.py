"""A burst is the training loop that anybody would write, looked at twice; somebody else's module survives it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from normlab.checks.burst import BETAS, auto_lr, burst, train
from normlab.checks.isolation import few_threads, preserved, quiet_numbers
from normlab.errors import NormLabError
from normlab.targets import resolve
from normlab.targets.scheme import SchemeTarget

SMALL = {"width": 16, "length": 8, "batch_size": 2}


def small(scheme: str = "pre", depth: int = 3) -> SchemeTarget:
    target = resolve(scheme, depth=depth, **SMALL)
    assert isinstance(target, SchemeTarget)
    return target


def by_hand(target: SchemeTarget, steps: int, lr: float) -> list[float]:
    model, batches = target.build(seed=0).train(), target.batches(0)
    optimiser = AdamW(model.param_groups(lr=lr), betas=BETAS, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model.loss(*next(batches))
        loss.backward()
        optimiser.step()
        model.after_step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", ["pre", "ngpt"])
def test_a_burst_is_a_plain_training_loop(scheme):
    target = small(scheme)
    run = burst(target, steps=4, lr=1e-2)
    # Fused and plain AdamW round differently: 2⁻²³ a step, grown by a steep loss; no step is left out or repeated.
    assert run.losses == pytest.approx(by_hand(target, 5, 1e-2), rel=1e-4)
    assert run.losses[:4] == train(target, steps=4, lr=1e-2)
    assert run.parameters == sum(p.numel() for p in target.build().parameters())


def test_both_looks_are_at_real_steps():
    run = burst(small(), steps=3)
    (before,), (after,) = run.before.values(), run.after.values()
    assert (before.step, after.step) == (0, 3)
    assert before.loss == run.losses[0]
    assert after.loss == run.losses[3]
    assert all(ratio is not None and ratio > 0.0 for look in (before, after) for ratio in look.upd_ratio)
    assert all(size is not None and size > 0.0 for look in (before, after) for size in look.grad_h)


def test_the_same_seed_gives_the_same_burst_and_another_does_not():
    first, again, other = (burst(small(), steps=2, seed=seed) for seed in (0, 0, 1))
    assert first.losses == again.losses
    assert first.after == again.after
    assert first.losses != other.losses
    assert all(profile.seed == 1 for profile in other.after.values())


def test_inspect_sees_the_model_at_both_looks():
    seen = []
    burst(
        small(), depth=2, steps=2, inspect=lambda model, profile: seen.append((len(model.stack.layers), profile.step))
    )
    assert seen == [(2, 0), (2, 2)]


class Faulty(SchemeTarget):
    """One MLP returns NaN from its `first`-th run on."""

    first = 7

    def _make(self, depth, width, seed):
        model, calls = super()._make(depth, width, seed), []

        def spoil(_module, _args, output):
            calls.append(1)
            return output * math.nan if len(calls) > self.first else output

        model.stack.layers[1].branches[1].register_forward_hook(spoil)
        return model


def faulty(first: int) -> Faulty:
    like = small()
    target = Faulty(like.scheme, like.task.data, depth=3, width=16, length=8, batch_size=2)
    target.first = first
    return target


def test_a_nan_ends_the_burst_and_is_named_with_module_and_step():
    run = burst(faulty(7), steps=20)
    (after,) = run.after.values()
    assert None not in run.losses[:7]
    assert run.losses[7:] == [None]
    assert after.step == 7
    assert after.first_broken == 2
    assert after.nan_first == "stack.layers.1.branches.1 at step 7"


def test_a_model_that_is_broken_from_the_start_has_one_look():
    run = burst(faulty(0), steps=20)
    (before,) = run.before.values()
    assert before.nan_first == "stack.layers.1.branches.1 at step 0"
    assert run.after == {}
    assert run.losses == [None]


class Steep(SchemeTarget):
    """From the third loss on its gradient is infinite while it is still finite itself."""

    count = 0

    def loss(self, model, batch):
        self.count += 1
        loss = super().loss(model, batch)
        return Overflow.apply(loss) if self.count > 2 else loss


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def test_a_gradient_that_is_not_finite_is_never_applied():
    like = small()
    target = Steep(like.scheme, like.task.data, depth=3, width=16, length=8, batch_size=2)
    run = burst(target, steps=9)
    (after,) = run.after.values()
    assert after.step == 2
    assert after.first_broken is None
    assert after.gradient_broken
    assert len(run.losses) == 3
    assert None not in run.losses


def test_a_run_that_rises_too_high_stops():
    losses = train(small(), steps=50, lr=30.0, highest=6.0)
    assert len(losses) < 50
    assert losses[-1] is None or losses[-1] > 6.0
    assert all(loss <= 6.0 for loss in losses[:-1])


class Owned(nn.Module):
    """With everything that a burst could disturb."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.first.weight.grad = torch.ones(4, 4)
        self.last.weight.requires_grad_(False)
        self.eval()
        self.norm.train()

    def forward(self, x):
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, True)).square().mean()


@pytest.mark.parametrize("fails", [False, True])
def test_a_live_module_is_left_as_it_was(fails):
    model = Owned()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    generator = torch.random.get_rng_state()
    with pytest.raises(KeyError) if fails else preserved(model), preserved(model):
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.randn(8, 4)).backward()
        optimiser.step()
        assert not torch.equal(model.first.weight, values["first.weight"])
        if fails:
            raise KeyError
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert [module.training for module in model.modules()] == [False, False, True, False]
    assert torch.equal(model.first.weight.grad, torch.ones(4, 4))
    assert model.last.weight.grad is None
    assert model.norm.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize("was_on", [False, True])
def test_denormals_are_zero_inside_and_as_before_after(was_on):
    tiny = torch.tensor(1e-42)
    torch.set_flush_denormal(was_on)
    try:
        with quiet_numbers():
            assert float(tiny * 1.0) == 0.0
        assert (float(tiny * 1.0) == 0.0) is was_on
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("width", "count"), [(64, 1), (256, 1), (257, 2), (None, 2)])
def test_narrow_models_run_in_one_thread(width, count):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with few_threads(width):
            assert torch.get_num_threads() == count
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_burst_uses_up_no_random_number():
    generator = torch.random.get_rng_state()
    burst(small(), steps=2)
    assert torch.equal(torch.random.get_rng_state(), generator)


class Foreign:
    """As much of a target as the rate asks about."""

    kind, blocks = "factory", None


@pytest.mark.parametrize(("std", "rate"), [(0.02, 1.6e-4), (1e-4, 8e-7), (0.5, 1e-3), (0.0, 1e-3)])
def test_the_automatic_rate_follows_the_size_of_the_weights(std, rate):
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=std)
    # The RMS of 32·32 normal numbers differs from their deviation by 1/√(2·1024), six times over at most.
    assert auto_lr(Foreign(), model) == pytest.approx(rate, rel=6 / math.sqrt(2 * 1024))
    assert auto_lr(small(), model) == 1e-3


def test_no_model_is_built_for_a_rate_that_needs_none(monkeypatch):
    target = small()
    monkeypatch.setattr(target, "build", lambda **_sizes: pytest.fail("built"))
    assert auto_lr(target) == 1e-3


def test_a_model_whose_parameters_are_all_frozen_is_refused():
    class Frozen(SchemeTarget):
        def param_groups(self, model, lr, weight_decay):
            return [{"params": []}]

    like = small()
    with pytest.raises(NormLabError, match="no parameter that can be trained"):
        burst(Frozen(like.scheme, like.task.data, depth=2, width=16, length=8, batch_size=2))
