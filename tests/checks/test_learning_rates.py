"""The learning-rate ladder against the published table, and against laws that are planted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normlab.checks import learning_rates
from normlab.checks.burst import train
from normlab.checks.config import CheckConfig
from normlab.checks.learning_rates import RATES, final_loss, rate_ladder, with_reference
from normlab.targets import resolve

START = 4.3
TABLE = {
    "post": [4.01, 3.62, 3.60, 4.07, 4.06, 4.06, 4.09, None],
    "pre": [3.70, 3.24, 2.91, 2.81, 2.87, 3.44, 4.10, 4.64],
    "peri": [3.93, 3.49, 3.07, 2.91, 2.94, 3.05, 3.59, 5.27],
    "peri(step=0.1)": [3.88, 3.43, 2.97, 2.77, 2.73, 2.72, 2.76, 3.29],
}
"""Depth 12, 60 steps (facts/stability.md, section 3)."""


class Design:
    """A name whose losses are planted."""

    def __init__(self, name: str, twin: Design | None = None):
        self.name, self._twin = name, twin

    def twin(self):
        return self._twin


def say_nothing(_words: str) -> None:
    pass


@pytest.fixture
def planted(monkeypatch):
    """Losses by design; between the rates of the ladder that of the next larger one."""
    asked = []

    def train(target, *, depth=None, seed=0, steps, lr, highest=math.inf):
        asked.append((target.name, lr))
        row = TABLE[target.name]
        loss = row[next(place for place, rate in enumerate(RATES) if rate >= lr * (1 - 1e-9))]
        return [START, *([None] if loss is None else [loss] * (steps - 1))]

    monkeypatch.setattr(learning_rates, "train", train)
    return asked


def ladder(name: str, twin: str | None = None, **options):
    target = Design(name, None if twin is None else Design(twin))
    return rate_ladder(target, CheckConfig(lr_ladder=True, **options), say_nothing, depth=12)


@pytest.mark.parametrize(
    ("name", "sens", "usable", "decades"),
    [
        ("post", 1.26, None, 0.0),
        ("pre", 0.70, (1e-3, 1e-2), 1.0),
        ("peri", 0.69, (1e-3, 3e-2), 1.5),
        ("peri(step=0.1)", 0.35, (1e-3, 1e-1), 2.0),
    ],
)
def test_the_published_table_comes_out(planted, name, sens, usable, decades):
    found, notes = ladder(name, reference_loss=2.72)
    # The table gives two decimals and rates half a decade apart: 3 stands for √10.
    assert found.sens == pytest.approx(sens, abs=0.005)
    assert found.usable == usable
    assert found.decades == pytest.approx(decades, abs=0.03)
    assert found.reference_from == "given"
    assert notes == ()


def test_a_lone_target_is_held_against_its_twin(planted):
    found, _ = ladder("peri", "pre")
    assert found.twin is not None
    assert found.twin.losses[3] == pytest.approx(2.81)
    assert (found.reference, found.reference_from) == (pytest.approx(2.81), "pre, its twin")
    better, _ = ladder("peri(step=0.1)", "pre")
    assert (better.reference, better.reference_from) == (pytest.approx(2.72), "peri(step=0.1)")


def test_no_twin_where_none_can_be_built_or_the_target_is_its_own(planted):
    alone, _ = ladder("peri")
    assert (alone.twin, alone.reference) == (None, pytest.approx(2.91))
    assert "no twin" in alone.reference_from
    planted.clear()
    own, _ = ladder("pre", "pre")
    assert own.twin is None
    assert own.reference == pytest.approx(2.81)
    assert [rate for _, rate in planted][: len(RATES)] == list(RATES)


def test_two_designs_share_the_lower_reference(planted):
    found, _ = ladder("pre", "pre")
    shared = with_reference(found, 2.72, "peri(step=0.1)")
    assert shared.sens == pytest.approx(found.sens + 2.81 - 2.72)
    assert shared.losses == found.losses
    assert shared.reference_from == "peri(step=0.1)"


@pytest.mark.parametrize("edge", [0.031, 0.05, 0.0999])
def test_the_largest_rate_is_found_by_bisection(monkeypatch, edge):
    monkeypatch.setattr(
        learning_rates, "train", lambda target, *, steps, lr, **_: [START] + ([3.0] * 59 if lr <= edge else [None])
    )
    found, _ = ladder("pre", reference_loss=2.0)
    # From 0.03 to 0.1 in eight equal steps of log η.
    assert found.lr_max <= edge < found.lr_max * (0.1 / 0.03) ** (1 / 8) * (1 + 1e-12)


def test_no_rate_learns(monkeypatch):
    monkeypatch.setattr(learning_rates, "train", lambda target, *, steps, lr, **_: [START, None])
    found, _ = ladder("pre", "peri")
    assert found.lr_max is None
    assert found.usable is None
    assert found.losses == (None,) * len(RATES)
    assert found.sens == pytest.approx(0.0)


def test_a_first_step_that_breaks_gives_no_ladder(monkeypatch):
    monkeypatch.setattr(learning_rates, "train", lambda target, *, steps, lr, **_: [None])
    found, (note,) = ladder("pre", "peri")
    assert found is None
    assert "first step is not finite" in note


def test_rates_that_do_not_fit_are_left_out(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(learning_rates, "train", lambda target, *, steps, lr, **_: [START] + [3.0] * 59)
    monkeypatch.setattr(learning_rates.time, "perf_counter", lambda: next(clock) * 10.0)
    found, (note,) = ladder("pre", reference_loss=2.0, max_seconds=60.0)
    assert 1 <= len(found.losses) == len(found.rates) < len(RATES)
    assert "0.3 left out to stay within 60 s" in note
    assert found.lr_max == found.rates[-1]


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ([9.0] * 52 + [1.0] * 8, 1.0),
        ([1.0] * 59 + [None], None),
        ([1.0, 20.5], None),
        ([4.0, 2.0], 3.0),
        ([], None),
    ],
)
def test_the_final_loss_is_a_mean_of_the_last_steps(losses, value):
    assert final_loss(losses) == value


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * math.inf


class Breaks(nn.Module):
    """Every loss is finite; the third gradient is not."""

    def __init__(self, depth: int = 2):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        y = self.blocks(x)
        return InfiniteGradient.apply(y) if self.calls == 3 else y


def test_a_rate_at_which_a_gradient_broke_has_no_loss():
    target = resolve(Breaks, batch=torch.randn(2, 3, 4), loss_fn=lambda model, x: model(x).square().mean())
    losses = train(target, steps=6, lr=1e-3)
    assert len(losses) == 4
    assert losses[-1] is None
    assert final_loss(losses) is None
