"""What attention looks at, without giving up fused kernels: a few rows of softmax(s·q kᵀ + mask) are computed again.

For the duration of `watch_attention` every call of torch's `scaled_dot_product_attention` is seen on its way: it runs
as it would have, and for at most 64 queries of each head the scores are recomputed from q and k in fp32. Queries are
spread evenly over positions and over the batch. Only numbers are kept. Attention written out by hand is not seen.

Rows with fewer than two visible keys say nothing and are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from normlab.norms import widen

ROWS = 64
LOW_ENTROPY = 0.05
"""A head whose normalised entropy is below this looks at one key."""

_NAME = "scaled_dot_product_attention"


class AttentionStats(NamedTuple):
    """One call of attention: tensors without dimensions, on the call's device. NaN where no row qualifies."""

    entropy: torch.Tensor
    """Row entropy ÷ log(visible keys): mean over rows, then over heads."""
    low_share: torch.Tensor
    """Share of heads whose entropy is below LOW_ENTROPY."""
    logit_max: torch.Tensor
    """Largest score of a visible key, mask included."""
    sink: torch.Tensor
    """Mass on the first key, mean over the rows that see it."""


@contextmanager
def watch_attention(on_call: Callable[[AttentionStats], None], rows: int = ROWS) -> Iterator[None]:
    """Calls `on_call` with the statistics of every call of scaled_dot_product_attention outside of backward passes."""
    original = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = original(*args, **kwargs)
        # Activation checkpointing calls attention once more, from inside the backward pass.
        if not in_backward():
            stats = attention_stats(**_named(*args, **kwargs), rows=rows)
            if stats is not None:
                on_call(stats)
        return output

    # Whoever imported the function by name holds it, too.
    holders = [module for module in list(sys.modules.values()) if vars_of(module).get(_NAME) is original]
    holders = [module for module in holders if not module.__name__.startswith("torch._C")]
    try:
        for module in holders:
            setattr(module, _NAME, watched)
        yield
    finally:
        for module in holders:
            if vars_of(module).get(_NAME) is watched:
                setattr(module, _NAME, original)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def vars_of(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})


def _named(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    # Grouped queries need no flag to be recognised: there are fewer key heads than query heads.
    return {"query": query, "key": key, "attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}


@torch.no_grad()
def attention_stats(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: int = ROWS,
) -> AttentionStats | None:
    """Statistics of softmax(scale · q kᵀ + mask) for q (B, H, T, E) or (B, T, E); None for what has another shape."""
    if query.ndim not in (3, 4) or key.ndim != query.ndim or 0 in query.shape or 0 in key.shape:
        return None
    if query.ndim == 3:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    elements, positions = _sample(query.shape[0], query.shape[2], rows, query.device)
    scores = _scores(query, key, elements, positions, scale)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if is_causal:
        visible &= torch.arange(key.shape[2], device=query.device) <= positions[:, None, :, None]
    if attn_mask is not None:
        full = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        picked = full[elements[:, None], :, positions].transpose(1, 2)
        if picked.dtype == torch.bool:
            visible &= picked
        else:
            # Half of the most negative number there is: some write that in place of −inf.
            visible &= picked > torch.finfo(picked.dtype).min / 2
            scores = scores + widen(picked)
    return _summarise(scores, visible)


def _sample(batch: int, length: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch elements (b,) and query positions (b, r) in them, b·r ≤ rows (or one element's share of them)."""
    b = min(batch, rows)
    r = min(length, rows // b)
    elements = torch.arange(b, device=device) * batch // b
    # Element i takes every b-th of b·r evenly spaced positions, from the i-th on; all of them where there are few.
    spread = (2 * torch.arange(b * r, device=device) + 1) * length // (2 * b * r)
    positions = spread.view(r, b).T if r < length else torch.arange(length, device=device).expand(b, length)
    return elements, positions


def _scores(
    query: torch.Tensor, key: torch.Tensor, elements: torch.Tensor, positions: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """(b, H, r, S), in fp32 at least."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    q = widen(query[elements[:, None], :, positions]).transpose(1, 2)
    k = widen(key.expand(query.shape[0], *key.shape[1:])[elements])
    b, heads, r, width = q.shape
    # Query head h reads key head h // group, as in scaled_dot_product_attention.
    grouped = q.reshape(b, k.shape[1], heads // k.shape[1] * r, width)
    with torch.autocast(q.device.type, enabled=False):
        return (grouped @ k.transpose(-1, -2) * scale).view(b, heads, r, -1)


def _summarise(scores: torch.Tensor, visible: torch.Tensor) -> AttentionStats:
    scores = scores.masked_fill(~visible, -math.inf)
    counts = visible.sum(-1)
    counted = counts >= 2
    top = scores.amax(-1, keepdim=True)
    # A row that sees nothing has no largest score; it is not counted below.
    shifted = scores - top.masked_fill(top == -math.inf, 0.0)
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    p = weights / total
    # H = log Σe^s − Σ p·s, with 0·(−∞) = 0.
    entropy = total.log().squeeze(-1) - (p * shifted.masked_fill(~visible, 0.0)).sum(-1)
    per_head = _mean(entropy / counts.clamp_min(2).log(), counted, dims=(0, 2))
    known = ~per_head.isnan()
    return AttentionStats(
        entropy=per_head.nanmean(),
        low_share=_mean((per_head < LOW_ENTROPY).to(p.dtype), known, dims=(0,)),
        logit_max=_largest(top, counted),
        sink=_mean(p[..., 0], counted & visible[..., 0], dims=(0, 1, 2)),
    )


def _mean(values: torch.Tensor, chosen: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Mean over the chosen values; NaN where there are none."""
    return torch.where(chosen, values, 0.0).sum(dims) / chosen.sum(dims)


def _largest(top: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    found = torch.where(counted, top.squeeze(-1), -math.inf).amax()
    return torch.where(found == -math.inf, math.nan, found)
