"""Attention among particles against a transcription token by token, in every way that it is computed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normlab.dynamics.system import attention as module
from normlab.dynamics.system.attention import LowRank, ParticleAttention
from normlab.errors import NormLabError


def tokens(systems: int, n: int, d: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(systems, n, d, dtype=torch.float64), dim=-1).to(dtype)


def transcription(x, beta, scores, values, causal=False, kind="softmax"):
    """A_j, one token after the other; matrices (H, d, d)."""
    out = torch.zeros_like(x)
    for s, system in enumerate(x):
        for j, token in enumerate(system):
            seen = system[: j + 1] if causal else system
            for score, value in zip(scores, values, strict=True):
                weights = torch.exp(beta[s] * (seen @ (score.mT @ token)))
                weights = weights / (weights.sum() if kind == "softmax" else len(seen))
                out[s, j] += weights @ (seen @ value.mT)
    return out


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [2, 3, 17])
def test_equals_its_transcription(d, causal, kind):
    x, beta = tokens(3, 7, d), torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    score, value = torch.randn(2, 2, d, d, dtype=torch.float64)
    found = ParticleAttention(beta=beta, score=score, value=value, causal=causal, kind=kind)(x)
    torch.testing.assert_close(found, transcription(x, beta, score, value, causal, kind), rtol=1e-12, atol=1e-12)
    plain = ParticleAttention(beta=beta, causal=causal, kind=kind)(x)
    eye = torch.eye(d, dtype=torch.float64).unsqueeze(0)
    torch.testing.assert_close(plain, transcription(x, beta, eye, eye, causal, kind), rtol=1e-12, atol=1e-12)


def test_factors_are_their_product():
    x, beta = tokens(2, 6, 8), torch.tensor([2.0], dtype=torch.float64)
    q, k, v, o = torch.randn(4, 3, 4, 8, dtype=torch.float64)
    whole = ParticleAttention(beta=beta, score=q.mT @ k, value=o.mT @ v)(x)
    torch.testing.assert_close(ParticleAttention(beta=beta, score=LowRank(q, k), value=LowRank(o, v))(x), whole)


def test_every_system_has_its_own_weights_and_temperature():
    x, beta = tokens(3, 5, 4), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    score, value = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64)
    together = ParticleAttention(beta=beta, score=score, value=value)(x)
    for s in range(3):
        alone = ParticleAttention(beta=beta[s], score=score[s], value=value[s])(x[s : s + 1])
        torch.testing.assert_close(together[s : s + 1], alone)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_and_fused_attention_change_nothing(monkeypatch, d, causal, kind, dtype):
    x = tokens(5, 13, d, dtype)
    attend = ParticleAttention(beta=torch.tensor([3.0]), causal=causal, kind=kind)
    monkeypatch.setattr(module, "_FUSED_FROM", 10**9)
    whole = attend(x)
    # Weights sum to one and tokens have length one: each of 13 products is off by eps at most, twice over.
    # Unnormalised weights reach e^3.
    off = 26 * torch.finfo(dtype).eps * (1 if kind == "softmax" else math.exp(3.0))
    for scores in (13 * 13 * 2, 13 * 4, 1):
        monkeypatch.setattr(module, "_SCORES", scores)
        torch.testing.assert_close(attend(x), whole, rtol=0, atol=off)
    monkeypatch.setattr(module, "_FUSED_FROM", 1)
    torch.testing.assert_close(attend(x), whole, rtol=0, atol=off)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kind": "unnormalised"}])
def test_all_scores_never_exist_at_once(options):
    n, d = 3000, 4
    with _Largest() as largest:
        ParticleAttention(beta=torch.tensor([1.0]), **options)(tokens(1, n, d, torch.float32))
    assert largest.numbers <= max(module._SCORES, n * d)
    assert n * n > module._SCORES


def test_without_temperature_attention_is_the_mean():
    x = tokens(2, 9, 5)
    found = ParticleAttention(beta=torch.tensor([0.0], dtype=torch.float64))(x)
    torch.testing.assert_close(found, x.mean(1, keepdim=True).expand_as(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_a_huge_beta_tokens_see_themselves(dtype):
    x = tokens(2, 9, 3, dtype)
    assert torch.equal(ParticleAttention(beta=torch.tensor([1e6], dtype=dtype))(x), x)


def test_the_first_token_of_a_causal_system_sees_itself_alone():
    x = tokens(1, 6, 3)
    attend = ParticleAttention(beta=torch.tensor([2.0], dtype=torch.float64), causal=True)
    changed = torch.cat([x[:, :1], tokens(1, 5, 3)], dim=1)
    assert torch.equal(attend(x)[:, 0], x[:, 0])
    assert torch.equal(attend(changed)[:, 0], x[:, 0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": torch.tensor([1.0, -0.5])}, "not negative, got -0.5"),
        ({"beta": torch.tensor(math.nan)}, "β must be finite"),
        ({"beta": torch.tensor(math.inf)}, "β must be finite in torch.float32 and not negative, got inf"),
        ({"beta": torch.tensor(1.0), "kind": "softmin"}, "unknown kind of attention 'softmin'; did you mean 'softmax'"),
        ({"beta": torch.tensor(1.0), "score": torch.ones(2, 3, 3), "value": torch.ones(1, 3, 3)}, "2 heads of scores"),
    ],
)
def test_bad_input_is_told_in_one_line(options, said):
    with pytest.raises(NormLabError, match=said) as caught:
        ParticleAttention(**options)
    assert "\n" not in str(caught.value)
