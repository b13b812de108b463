"""Sampling: greedy, limits on the support, and frequencies, with fixed seeds."""

import math

import pytest
import torch

from normlab.errors import NormLabError
from normlab.models.sampling import sample

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
DRAWS = 20_000


def frequencies(logits: torch.Tensor, **limits) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(DRAWS, -1), generator=generator, **limits)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / DRAWS


def assert_distributed(measured: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(measured > 0, expected > 0)
    # Five standard deviations of a binomial fraction; the seed is fixed, so it passes always or never.
    deviation = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((measured - expected).abs() <= 5 * deviation + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_temperature_zero_is_greedy(dtype: torch.dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0]], dtype=dtype)
    drawn = sample(logits, temperature=0)
    assert drawn.dtype == torch.long
    assert drawn.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(temperature: float):
    expected = PROBABILITIES ** (1 / temperature)
    assert_distributed(frequencies(PROBABILITIES.log(), temperature=temperature), expected / expected.sum())


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.2}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.8}, [1, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        # Of the two that top_k leaves, 4/7 alone reaches a half but not 0.6.
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
    ],
)
def test_limits_keep_the_likeliest_and_their_proportions(limits: dict, kept: list[int]):
    expected = torch.zeros(5).index_copy(0, torch.tensor(kept), PROBABILITIES[kept])
    assert_distributed(frequencies(PROBABILITIES.log(), **limits), expected / expected.sum())


def test_top_p_reached_exactly_needs_no_further_token():
    quarters = torch.zeros(1, 4, dtype=torch.float64)
    drawn = {int(sample(quarters, top_p=0.5, generator=torch.Generator().manual_seed(seed))) for seed in range(64)}
    # Ties go to the smaller index; each is missed by 64 draws with probability 2^-64.
    assert drawn == {0, 1}


def test_ties_at_the_edge_of_top_k_keep_exactly_k():
    assert torch.equal(frequencies(torch.zeros(6), top_k=2) > 0, torch.tensor([True, True] + [False] * 4))


def test_rows_are_independent_and_the_generator_decides():
    logits = torch.full((3, 4), -math.inf)
    logits[[0, 1, 2], [2, 0, 3]] = 0.0
    assert sample(logits).tolist() == [2, 0, 3]
    even = torch.zeros(50, 10)
    first, second = (sample(even, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_tiny_temperatures_do_not_overflow():
    for temperature in (1e-38, 1e-300):
        assert sample(torch.tensor([[1e4, 1e4 - 1, -1e4]]), temperature=temperature).tolist() == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
    ],
)
def test_refuses_bad_arguments(wrong: dict):
    with pytest.raises(NormLabError, match="expected"):
        sample(torch.zeros(1, 3), **wrong)


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3), (2, 0)])
def test_refuses_bad_shapes(shape: tuple[int, ...]):
    with pytest.raises(NormLabError, match=r"expected \(batch, vocabulary\)"):
        sample(torch.zeros(shape))
