"""Sample the next token from logits, with temperature, top-k and top-p."""

from __future__ import annotations

import math

import torch

from normlab.errors import NormLabError


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Sample one token per row of logits (B, V); returns a LongTensor (B,).

    Temperature 0 is greedy. `top_k` keeps the k most likely tokens. `top_p` keeps the smallest set of most likely
    tokens whose probability, after top-k, reaches top_p, but at least one. Ties go to the smaller index.
    """
    _check(logits, temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    ranked, tokens = _scaled(logits, temperature).sort(dim=-1, descending=True, stable=True)
    probabilities = _restricted(ranked.softmax(-1), top_k, top_p)
    rank = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, rank).squeeze(-1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest is subtracted first: inf - inf has no value. Nor has 0 / 0, where a tiny temperature is rounded to 0.
    tiniest = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, tiniest)


def _restricted(ranked: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Sorted probabilities with excluded tokens removed or set to 0 (multinomial renormalises)."""
    if top_k is not None:
        ranked = ranked[:, :top_k]
    # top_p = 1 excludes nothing: a cumulative sum that rounds up to 1 early would remove the tail.
    if top_p is not None and top_p < 1:
        mass_before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(mass_before >= top_p * ranked.sum(-1, keepdim=True), 0)
    return ranked


def _check(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if logits.ndim != 2 or logits.shape[-1] < 1:
        raise NormLabError(f"sample: logits have shape {tuple(logits.shape)}; expected (batch, vocabulary)")
    if not 0 <= temperature < math.inf:
        raise NormLabError(f"sample: temperature is {temperature}; expected 0 (greedy) or a positive number; try 1.0")
    if top_k is not None and top_k < 1:
        raise NormLabError(f"sample: top_k is {top_k}; expected 1 or more, or None for no limit")
    if top_p is not None and not 0 < top_p <= 1:
        raise NormLabError(f"sample: top_p is {top_p}; expected a number in (0, 1], or None for no limit")
