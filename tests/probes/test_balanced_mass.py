"""Balanced mass of attention rows: the measure of the probes against all keys, and those against the Jacobian."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.probes import attention
from normlab.probes.attention import HEAVIEST
from tests.probes.balanced_mass import balanced_mass


def exact_balanced_mass(p: torch.Tensor) -> float:
    """The largest Σ_i |(J s)_i| over signs s, with the Jacobian J = diag(p) − p pᵀ written out."""
    jacobian = torch.diag(p) - torch.outer(p, p)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(p))), dtype=p.dtype)
    return float((signs @ jacobian.T).abs().sum(-1).max())


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        ([0.5, 0.5], 1.0),
        ([0.25] * 4, 1.0),
        ([1 / 3] * 3, 8 / 9),
        ([0.9, 0.1], 0.36),
        ([1.0, 0.0, 0.0], 0.0),
        ([1.0], 0.0),
    ],
)
def test_balanced_mass_in_closed_form(p, expected):
    found = balanced_mass(torch.tensor(p, dtype=torch.float64))
    assert float(found) == pytest.approx(expected)
    assert exact_balanced_mass(torch.tensor(p, dtype=torch.float64)) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=8))
def test_balanced_mass_is_the_norm_of_the_jacobian_or_a_little_less(scores):
    p = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    found, exact = float(balanced_mass(p)), exact_balanced_mass(p)
    assert found <= exact + 1e-12
    # The heavier side of the best parting, and the largest that the rule can make of it: θ = 4 P (1 − P).
    best = (1.0 + math.sqrt(max(1.0 - exact, 0.0))) / 2.0
    worst = min(7.0 / 6.0 * best, 1.0)
    assert found >= 4.0 * worst * (1.0 - worst) - 1e-12


def test_balanced_mass_works_on_rows():
    p = torch.rand(2, 3, 7).softmax(-1)
    rows = torch.stack([balanced_mass(row) for row in p.reshape(-1, 7)]).view(2, 3)
    torch.testing.assert_close(balanced_mass(p), rows)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
def test_balanced_mass_is_right_up_to_the_keys_that_are_not_weighed(spread):
    rows = (spread * torch.randn(200, 300)).softmax(-1)
    found, exact = attention._balanced_mass(rows), balanced_mass(rows)
    assert (found - exact).min() >= -1e-5
    assert (found - exact).max() <= 1 / (HEAVIEST + 1) ** 2
    torch.testing.assert_close(attention._balanced_mass(rows[:, :HEAVIEST] * 0 + 1 / HEAVIEST), torch.ones(200))
