"""Jacobians of branches: against matrices with a known norm, explicit derivatives and real gradients."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import normlab
from normlab.checks.theory.analysis import theory
from normlab.checks.theory.jacobians import MOST_BLOCKS, WHOLE, jacobian_rows, largest_singular_value
from normlab.probes.blocks import find_stacks
from normlab.probes.probe import measure
from normlab.probes.replay import capture
from normlab.utils.spaced import evenly_spaced
from tests.matrix import parametrize
from tests.targets.tiny import MODELS, batch_for, hugging_face

TOKENS = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
CLOSE = 0.01
"""What ten iterations leave open, from below; with as many iterations as dimensions they are exact."""


def ours(scheme: str, depth: int = 3) -> normlab.Decoder:
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "hidden": 24, "vocab_size": 16, "init_std": 0.2, "tied": False}
    return normlab.Decoder(normlab.DecoderConfig(scheme=scheme, depth=depth, **sizes))


def rows_of(model: nn.Module, run):
    return jacobian_rows(model, find_stacks(model)[0], run)


class Linear(nn.Module):
    """x + step · W x, and a part that is zero."""

    def __init__(self, matrix: torch.Tensor, step: float):
        super().__init__()
        self.first, self.second, self.step = nn.Linear(*matrix.shape, bias=False), nn.Linear(*matrix.shape), step
        with torch.no_grad():
            self.first.weight.copy_(matrix)
            self.second.weight.zero_()

    def forward(self, x):
        x = x + self.step * self.first(x)
        return x + self.second(x)


def stack_of(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(*blocks))[0]


def test_a_linear_branch_has_the_norm_of_its_matrix():
    torch.manual_seed(1)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    matrix = turn @ torch.diag(torch.tensor([5.0, 2.0, 1.0, 0.5, 0.1, 0.0, 0.0, 0.0])) @ turn.T
    model = stack_of(*(Linear(matrix * scale, 0.1) for scale in (1.0, 3.0)))
    rows = rows_of(model, lambda: model(torch.randn(2, 3, 8)))
    assert [(row.block, row.branch) for row in rows] == [(k, name) for k in (0, 1) for name in ("first", "second")]
    assert [row.norm for row in rows] == pytest.approx([0.5, 0.0, 1.5, 0.0], rel=1e-3)


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7), (1, 1)])
def test_power_iteration_finds_the_largest_singular_value(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
    found = largest_singular_value(lambda x: x @ matrix.T, torch.zeros(shape[1]))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    # Each quotient is one of a unit vector: never above the norm, but for rounding.
    assert exact * (1 - CLOSE) <= found <= exact * (1 + 1e-5)


def test_what_does_not_depend_on_the_state_and_what_is_not_finite():
    assert largest_singular_value(lambda x: torch.ones(3), torch.ones(3)) == 0.0
    assert largest_singular_value(lambda x: 0.0 * x, torch.ones(3)) == 0.0
    assert math.isnan(largest_singular_value(lambda x: math.nan * x, torch.ones(3)))


def explicit(call, hold=()) -> float:
    """‖∂(block(x) − x)/∂x‖ from the whole matrix, with some modules' outputs held."""
    hooks = [module.register_forward_hook(lambda _m, _a, out: out.detach()) for module in hold]
    derivative = torch.autograd.functional.jacobian(lambda x: call.with_state(x).repeat() - x, call.state)
    for hook in hooks:
        hook.remove()
    size = call.state.numel()
    return float(torch.linalg.matrix_norm(derivative.reshape(size, size), 2))


def test_branches_of_an_identity_skip_against_the_explicit_derivative():
    model = ours("pre").eval()
    rows = rows_of(model, lambda: model(TOKENS))
    stack = find_stacks(model)[0]
    calls = capture(stack, stack.blocks, lambda: model(TOKENS))
    assert [row.branch for row in rows[:2]] == ["branches.0.out", "branches.1.down"]
    for row in rows:
        call = calls[row.block]
        other = next(r.branch for r in rows if r.block == row.block and r.branch != row.branch)
        exact = explicit(call, [call.block.get_submodule(other)])
        assert exact * (1 - CLOSE) <= row.norm <= exact * (1 + 1e-4)


@parametrize("scheme", ["post", "geonorm", "ngpt", "spannorm", "deepnorm"], quick=["post", "spannorm"])
def test_a_skip_that_is_not_the_identity_has_one_row_for_all_that_a_block_adds(scheme):
    model = ours(scheme).eval()
    rows = rows_of(model, lambda: model(TOKENS))
    stack = find_stacks(model)[0]
    calls = capture(stack, stack.blocks, lambda: model(TOKENS))
    assert [(row.block, row.branch) for row in rows] == [(place, WHOLE) for place in range(3)]
    for row, call in zip(rows, calls, strict=True):
        exact = explicit(call)
        assert exact * (1 - CLOSE) <= row.norm <= exact * (1 + 1e-4)


def look_at(model, batch, loss):
    target = SimpleNamespace(batches=lambda seed: iter([batch]), loss=loss, blocks=None)
    return theory(target, model, measure(model, batch, loss))


@parametrize("scheme", [name for name in normlab.list_schemes() if name != "dual"], quick=["pre", "post", "hybrid"])
def test_no_gradient_gains_more_than_the_branches_allow(scheme):
    found = look_at(ours(scheme), TOKENS, lambda model, batch: model.loss(batch, batch))
    look = found.before
    # The iteration ends up to 1 % below the norm, in every branch.
    assert look.log_gain <= look.log_gain_bound + len(look.jacobians) * math.log1p(CLOSE)
    assert f"of at most Σ log(1 + ‖J‖) = {look.log_gain_bound:.2f} over 3 of 3 blocks" in found.jacobians


@parametrize("name", [name for name in MODELS if name != "t5"], quick=["gpt2", "bert"])
def test_published_models(name):
    found = look_at(hugging_face(name), batch_for(name), lambda model, batch: model(**batch).loss)
    look = found.before
    assert {row.block for row in look.jacobians} == {0, 1, 2}
    assert look.log_gain <= look.log_gain_bound + len(look.jacobians) * math.log1p(CLOSE)


def test_deep_stacks_are_sampled_and_their_ends_kept():
    assert evenly_spaced(4, MOST_BLOCKS) == [0, 1, 2, 3]
    assert evenly_spaced(MOST_BLOCKS, MOST_BLOCKS) == list(range(MOST_BLOCKS))
    assert evenly_spaced(48, MOST_BLOCKS)[0] == 0
    assert evenly_spaced(48, MOST_BLOCKS)[-1] == 47
    assert len(set(evenly_spaced(MOST_BLOCKS + 1, MOST_BLOCKS))) == len(evenly_spaced(48, MOST_BLOCKS)) == MOST_BLOCKS


def test_the_model_is_left_as_it_was():
    model = ours("pre").train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    rows_of(model, lambda: model(TOKENS))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Once(torch.autograd.Function):
    """A kernel of somebody's own, without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad


def test_a_kernel_without_a_second_derivative_is_a_note():
    model = ours("pre")
    for layer in model.stack.layers:
        layer.branches[1].register_forward_hook(lambda _module, _args, out: Once.apply(out))
    found = look_at(model, TOKENS, lambda model, batch: model.loss(batch, batch))
    assert found.jacobians == ""
    assert found.before.jacobians == ()
    assert any(note.startswith("no Jacobians of the branches: ") for note in found.notes)
    assert found.scale
