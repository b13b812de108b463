"""Attention statistics under fused kernels equal those of the full softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.probes import attention
from normlab.probes.attention import attention_rows, entropy, low_share, summarise, watch_attention
from tests.probes.balanced_mass import balanced_mass


class AttentionStats(NamedTuple):
    """The fields of `summarise`."""

    heads: torch.Tensor
    logit_max: torch.Tensor
    sink: torch.Tensor
    theta_p: torch.Tensor

    @property
    def entropy(self) -> float:
        return entropy(self.heads.tolist())

    @property
    def low_share(self) -> float:
        return low_share(self.heads.tolist())


def attention_stats(query, key, **options) -> AttentionStats:
    """The statistics of the rows that are looked at."""
    rows = attention_rows(query, key, **options)
    assert rows is not None
    return AttentionStats(**summarise(*rows))


def brute_force(q, k, visible, bias=None, scale=None) -> AttentionStats:
    """The definitions, one row at a time in float64; q and k (B, H, T, E) with the same heads, visible (B, H, T, S)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.double() @ k.double().mT * scale + (0.0 if bias is None else bias.double())
    per_head, largest, sinks, balanced = [], -math.inf, [], []
    for h in range(q.shape[1]):
        rows = []
        for b in range(q.shape[0]):
            for t in range(q.shape[2]):
                seen = visible[b, h, t]
                if seen.sum() < 2:
                    continue
                p = scores[b, h, t][seen].softmax(-1)
                rows.append(torch.special.entr(p).sum() / math.log(int(seen.sum())))
                largest = max(largest, float(scores[b, h, t][seen].max()))
                balanced.append(balanced_mass(p))
                if seen[0]:
                    sinks.append(p[0])
        per_head.append(torch.stack(rows).mean())
    return AttentionStats(
        torch.stack(per_head), torch.tensor(largest), torch.stack(sinks).mean(), torch.stack(balanced).mean()
    )


def seen_by_watch(*args, **kwargs) -> tuple[list[AttentionStats], torch.Tensor]:
    calls: list[AttentionStats] = []
    with watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        output = F.scaled_dot_product_attention(*args, **kwargs)
    return calls, output


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(shape) * spread


def close(measured: AttentionStats, expected: AttentionStats, tolerance: float = 1e-5) -> None:
    # Sums of at most some hundred fp32 numbers of order one to ten: well below 1e-5.
    for one, other in zip(measured, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


B, H, T, S, E = 2, 4, 7, 9, 8


def masks() -> dict[str, tuple[dict, torch.Tensor, torch.Tensor | None]]:
    """Name: arguments for SDPA, what is visible, bias."""
    everything = torch.ones(B, H, T, S, dtype=torch.bool)
    some = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.5
    some[0, 0, 3] = False
    some[0, 0, 4] = torch.arange(S) == 5
    band = torch.ones(T, S).tril(2).bool()
    slope = -torch.rand(1, H, T, S, generator=torch.Generator().manual_seed(2))
    written_out = torch.where(some, 0.0, torch.finfo(torch.float32).min)
    infinite = torch.where(some, slope, -math.inf)
    return {
        "none": ({}, everything, None),
        "causal": ({"is_causal": True}, everything & torch.ones(T, S).tril().bool(), None),
        "bool": ({"attn_mask": some}, everything & some, None),
        "two dimensions": ({"attn_mask": band}, everything & band, None),
        "bias": ({"attn_mask": slope}, everything, slope.expand(B, H, T, S)),
        "float minimum": ({"attn_mask": written_out}, everything & some, None),
        "bias and -inf": ({"attn_mask": infinite}, everything & some, slope.expand(B, H, T, S)),
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
def test_statistics_equal_the_full_softmax(name, scale, kv_heads):
    options, visible, bias = masks()[name]
    q, k, v = draw(B, H, T, E, spread=2.0), draw(B, kv_heads, S, E), draw(B, kv_heads, S, E)
    options = {**options, "scale": scale, "enable_gqa": kv_heads < H}
    calls, output = seen_by_watch(q, k, v, **options)
    assert torch.equal(output.nan_to_num(), F.scaled_dot_product_attention(q, k, v, **options).nan_to_num())
    (measured,) = calls
    close(measured, brute_force(q, k.repeat_interleave(H // kv_heads, 1), visible, bias, scale))


@pytest.mark.parametrize("name", masks())
def test_attention_that_is_written_out_is_seen_at_its_softmax(name):
    _, visible, bias = masks()[name]
    q, k = draw(B, H, T, E, spread=2.0), draw(B, H, S, E)
    scores = (q @ k.mT / math.sqrt(E) + (0.0 if bias is None else bias)).masked_fill(~visible, -math.inf)
    calls: list[AttentionStats] = []
    with watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        F.softmax(scores, dim=-1, dtype=torch.float32)
        # Neither a router over experts nor a distribution over classes is attention.
        F.softmax(scores[0, 0], dim=-1)
        F.softmax(scores, dim=1)
    (measured,) = calls
    close(measured, brute_force(q, k, visible, bias))


def test_three_dimensions_are_one_head():
    q, k = draw(B, T, E), draw(B, S, E)
    mask = torch.rand(B, T, S) > 0.3
    calls, _ = seen_by_watch(q, k, k, attn_mask=mask)
    close(calls[0], brute_force(q[:, None], k[:, None], mask[:, None]))


def test_positional_arguments_are_understood():
    q = draw(B, H, T, E)
    calls, _ = seen_by_watch(q, q, q, None, 0.0, True)
    close(calls[0], brute_force(q, q, torch.ones(B, H, T, T).tril().bool()))


@pytest.mark.parametrize(("batch", "length"), [(1, 1000), (3, 200), (100, 9), (64, 5)])
def test_at_most_64_rows_of_each_head_spread_over_positions(batch, length):
    elements, positions = attention._sample(batch, length, 64, torch.device("cpu"))
    assert positions.shape[0] == len(elements) <= batch
    assert 32 < positions.numel() <= 64 or positions.numel() == batch * length
    assert len(set(elements.tolist())) == len(elements)
    assert positions.min() >= 0
    assert positions.max() < length
    assert positions.float().mean() == pytest.approx((length - 1) / 2, abs=0.02 * length + 0.5)
    pairs = {(e, t) for e, row in zip(elements.tolist(), positions.tolist(), strict=True) for t in row}
    assert len(pairs) == positions.numel()


def test_a_sample_is_near_the_whole():
    q, k = draw(2, 2, 512, E), draw(2, 2, 512, E)
    whole = attention_stats(q, k, is_causal=True, rows=2 * 512)
    sample = attention_stats(q, k, is_causal=True)
    assert whole is not None
    assert sample is not None
    # 64 rows of each head, spread of the row entropy about 0.05: its mean is known to 0.05/8.
    assert abs(whole.entropy - sample.entropy) < 0.02
    assert float(sample.logit_max) <= float(whole.logit_max)


def test_a_head_that_looks_at_one_key_is_counted():
    q, k = draw(1, 4, T, E), draw(1, 4, T, E)
    q[:, 2], k[:, 2] = 0.0, 0.0
    q[:, 2, :, 0], k[:, 2, 0, 0] = 100.0, 100.0
    stats = attention_stats(q, k)
    assert stats is not None
    assert stats.low_share == 0.25
    assert [head < 0.05 for head in stats.heads] == [False, False, True, False]
    assert float(stats.logit_max) == pytest.approx(1e4 / math.sqrt(E))
    uniform = attention_stats(torch.zeros(1, 1, T, E), torch.zeros(1, 1, T, E), is_causal=True)
    assert uniform is not None
    assert uniform.entropy == pytest.approx(1.0)
    expected = sum(1 / n for n in range(2, T + 1)) / (T - 1)
    assert float(uniform.sink) == pytest.approx(expected)


def test_huge_scores_and_half_precision_do_not_overflow():
    q = torch.full((1, 1, 4, E), 250.0, dtype=torch.float16)
    calls, _ = seen_by_watch(q, q, q, scale=1.0)
    assert float(calls[0].logit_max) == 250.0**2 * E
    assert calls[0].entropy == pytest.approx(1.0)


def test_one_visible_key_says_nothing():
    q = draw(1, 2, 1, E)
    calls, _ = seen_by_watch(q, q, q, is_causal=True)
    assert all(value.isnan().all() for value in calls[0])
    assert math.isnan(calls[0].entropy)
    assert math.isnan(calls[0].low_share)


def test_nan_is_survived():
    q = draw(1, 2, T, E)
    q[0, 1] = math.nan
    calls, _ = seen_by_watch(q, q, q)
    clean = attention_stats(q[:, :1], q[:, :1])
    assert clean is not None
    assert calls[0].entropy == pytest.approx(clean.entropy)


def test_whoever_imported_the_function_by_name_is_seen_and_put_back(monkeypatch):
    import sys
    import types

    original = F.scaled_dot_product_attention
    elsewhere = types.ModuleType("elsewhere")
    elsewhere.scaled_dot_product_attention = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    calls: list[AttentionStats] = []
    q = draw(1, 2, T, E)
    with watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        elsewhere.scaled_dot_product_attention(q, q, q)
        assert F.scaled_dot_product_attention is not original
    assert len(calls) == 1
    with pytest.raises(RuntimeError), watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        elsewhere.scaled_dot_product_attention(q, q[..., :3], q)
    assert elsewhere.scaled_dot_product_attention is F.scaled_dot_product_attention is original


def test_torch_multi_head_attention_is_seen():
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), draw(2, T, 16)
    calls: list[AttentionStats] = []
    with watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        layer(x, x, x, need_weights=False)
    assert len(calls) == 1


def test_gradients_pass_unchanged_and_statistics_keep_no_graph():
    q = draw(1, 2, T, E).requires_grad_()
    calls, output = seen_by_watch(q, q, q)
    (gradient,) = torch.autograd.grad(output.sum(), q)
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
    assert torch.equal(gradient, expected)
    assert not any(value.requires_grad for value in calls[0])
    assert [value.numel() for value in calls[0]] == [2, 1, 1, 1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_runs_again_for_a_backward_pass_counts_once(reentrant):
    q = draw(1, 2, T, E).requires_grad_()
    calls: list[AttentionStats] = []
    with watch_attention(lambda rows: calls.append(AttentionStats(**summarise(*rows)))):
        checkpoint(lambda q: F.scaled_dot_product_attention(q, q, q), q, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 1
