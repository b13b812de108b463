"""Attention statistics of any model: entropy, largest score, attention sink and balanced mass.

While `watch_attention` is active, every call of torch's `scaled_dot_product_attention` runs as it would have, fused
kernels included, and for at most 64 queries of each head the scores softmax(s·q kᵀ + mask) are recomputed from q and k
in fp32. Queries are spread evenly over positions and over the batch. Attention that is written out is found by its
`softmax`: that of `torch.nn.functional`, of `torch`, or the method of a tensor.

Rows with fewer than two visible keys are left out: they say nothing.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from normlab.norms import widen
from normlab.probes.profile import LOW_ENTROPY

ROWS = 64
HEAVIEST = 16
"""Number of keys of a row, the heaviest, that are considered one by one."""


def entropy(heads: Sequence[float]) -> float:
    """Mean over heads; NaN if none is known."""
    known = [x for x in heads if not math.isnan(x)]
    return sum(known) / len(known) if known else math.nan


def low_share(heads: Sequence[float]) -> float:
    """Share of heads whose entropy is below LOW_ENTROPY; NaN if none is known."""
    return entropy([x if math.isnan(x) else float(x < LOW_ENTROPY) for x in heads])


class Rows(NamedTuple):
    """Some rows of one call of attention, (batch, heads, rows, keys)."""

    scores: torch.Tensor
    """Scores including the mask, in fp32 or wider."""
    visible: torch.Tensor


@contextmanager
def watch_attention(on_call: Callable[[Rows], None], rows: int = ROWS) -> Generator[None, None, None]:
    """Call `on_call` with some rows of every call of attention outside of backward passes; see `summarise`."""
    # Functions are replaced where they are held. A torch.overrides.TorchFunctionMode would need no replacing, but it
    # does not see inside nn.MultiheadAttention, whose F.multi_head_attention_forward is one overridable function: the
    # mode is off while that runs. It also costs 7 % of a probed step, against nothing that could be measured (median
    # of 9, forward and backward of 8 blocks of width 256 on 4 x 128 tokens, one CPU thread, torch 2.13: 0.441 s without
    # attention, 0.429 s replaced, 0.459 s with the mode). Neither costs anything where no probe is attached.
    inside = [False]

    def watched(original: Callable[..., torch.Tensor], look: Callable[..., Rows | None]):
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if inside[0]:
                # One softmax is made of another, and the fused call may be written out: the outermost counts.
                return original(*args, **kwargs)
            inside[0] = True
            try:
                output = original(*args, **kwargs)
            finally:
                inside[0] = False
            # Activation checkpointing calls attention once more, from inside the backward pass.
            found = None if in_backward() else look(rows, *args, **kwargs)
            if found is not None:
                on_call(found)
            return output

        return call

    fused, functional, plain = F.scaled_dot_product_attention, F.softmax, torch.softmax
    with ExitStack() as replaced:
        replaced.enter_context(_replaced("scaled_dot_product_attention", fused, watched(fused, _of_fused)))
        for softmax in (functional, plain):
            replaced.enter_context(_replaced("softmax", softmax, watched(softmax, _of_softmax)))
        replaced.enter_context(_replaced_method("softmax", watched(torch.Tensor.softmax, _of_softmax)))
        yield


@contextmanager
def _replaced(name: str, original: Any, watched: Any) -> Generator[None, None, None]:
    """Replace a function in every module that holds it: some have imported it by name."""
    holders = [module for module in list(sys.modules.values()) if vars_of(module).get(name) is original]
    holders = [module for module in holders if not module.__name__.startswith("torch._C")]
    try:
        for module in holders:
            setattr(module, name, watched)
        yield
    finally:
        for module in holders:
            if vars_of(module).get(name) is watched:
                setattr(module, name, original)


@contextmanager
def _replaced_method(name: str, watched: Any) -> Generator[None, None, None]:
    """Replace a method of `torch.Tensor`, which inherits its own unless another watch is active."""
    before = vars(torch.Tensor).get(name)
    setattr(torch.Tensor, name, watched)
    try:
        yield
    finally:
        if before is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, before)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def vars_of(module: Any) -> dict[str, Any]:
    """The attributes of a module; none for an object in `sys.modules` that is no module."""
    return getattr(module, "__dict__", {})


def _of_fused(
    rows: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rows | None:
    # Grouped queries need no flag to be recognised: there are fewer key heads than query heads.
    return attention_rows(query, key, attn_mask, is_causal, scale, rows)


@torch.no_grad()
def _of_softmax(rows: int, input: Any, dim: int | None = None, *_: Any, **__: Any) -> Rows | None:  # noqa: A002
    """Attention that is written out: a softmax over the keys of scores (B, H, T, S) or (B, T, T), mask included.

    With three dimensions it needs as many queries as keys: a router's scores of experts have three dimensions, too.
    """
    if not isinstance(input, torch.Tensor) or dim not in (-1, input.ndim - 1) or not input.is_floating_point():
        return None
    if input.ndim == 3 and input.shape[1] == input.shape[2]:
        input = input.unsqueeze(1)  # noqa: A001
    if input.ndim != 4 or 0 in input.shape:
        return None
    elements, positions = _sample(input.shape[0], input.shape[2], rows, input.device)
    scores = widen(_picked(input, elements, positions))
    return Rows(scores, _is_visible(scores, input.dtype))


@torch.no_grad()
def attention_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: int = ROWS,
) -> Rows | None:
    """Some rows of scale · q kᵀ + mask for q (B, H, T, E) or (B, T, E); None for other shapes."""
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
        picked = _picked(full, elements, positions)
        if picked.dtype == torch.bool:
            visible &= picked
        else:
            visible &= _is_visible(picked, picked.dtype)
            scores = scores + widen(picked)
    return Rows(scores, visible)


@functools.lru_cache(maxsize=64)
def _sample(batch: int, length: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch elements (b,) and query positions (b, r) in them, b·r ≤ rows (or one element's share of them)."""
    b = min(batch, rows)
    r = min(length, rows // b)
    elements = torch.arange(b, device=device) * batch // b
    # Element i takes every b-th of b·r evenly spaced positions, from the i-th on; all of them where there are few.
    spread = (2 * torch.arange(b * r, device=device) + 1) * length // (2 * b * r)
    positions = spread.view(r, b).T if r < length else torch.arange(length, device=device).expand(b, length)
    return elements, positions


def _picked(full: torch.Tensor, elements: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(b, H, r, S) of (B, H, T, S)."""
    return full[elements[:, None], :, positions].transpose(1, 2)


def _is_visible(scores: torch.Tensor, written_in: torch.dtype) -> torch.Tensor:
    # Half of the most negative number there is: some write that in place of −inf.
    return ~(scores <= torch.finfo(written_in).min / 2)


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


@torch.no_grad()
def summarise(scores: torch.Tensor, visible: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics of one call of attention from some of its rows, by name; NaN if no row sees two keys.

    heads       (heads,) entropy of a row ÷ log(visible keys), mean over rows
    logit_max   largest score of a visible key, mask included
    sink        weight of the first key, mean over the rows that see it
    theta_p     balanced mass, mean over rows and heads
    """
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
    return {
        "heads": _mean(entropy / counts.clamp_min(2).log(), counted, dims=(0, 2)),
        "logit_max": _largest(top, counted),
        "sink": _mean(p[..., 0], counted & visible[..., 0], dims=(0, 1, 2)),
        "theta_p": _mean(_balanced_mass(p), counted, dims=(0, 1, 2)),
    }


def _balanced_mass(p: torch.Tensor) -> torch.Tensor:
    """θ(p) of arXiv 2602.18849: 1 if the keys split into two halves of equal weight, 0 if one key has it all.

    The heaviest keys go one by one to the lighter side. The others even the two sides out as far as their weight
    allows, so θ is at most 1/(HEAVIEST + 1)² too large.
    """
    heaviest = p.topk(min(HEAVIEST, p.shape[-1])).values
    apart = torch.zeros_like(p[..., 0])
    for weight in heaviest.unbind(-1):
        apart = (apart - weight).abs()
    left = (1.0 - heaviest.sum(-1)).clamp(min=0.0)
    return 1.0 - (apart - left).clamp(min=0.0).square()


def _mean(values: torch.Tensor, chosen: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Mean over the chosen values; NaN if there are none."""
    return torch.where(chosen, values, 0.0).sum(dims) / chosen.sum(dims)


def _largest(top: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    found = torch.where(counted, top.squeeze(-1), -math.inf).amax()
    return torch.where(found == -math.inf, math.nan, found)
