"""Packed sequences: several documents in one row, none of which sees another."""

from __future__ import annotations

import torch


def document_positions(documents: torch.Tensor) -> torch.Tensor:
    """Positions that start again at zero with every document; `documents` (B, T) holds one number per document."""
    index = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    start = torch.where(begins, index, torch.zeros_like(index)).cummax(-1).values
    return index - start


def document_mask(documents: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """(B, 1, T, T), True where a query may look: at its own document, and no further than itself where it is causal."""
    T = documents.shape[-1]
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    if causal:
        same = same & torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return same.unsqueeze(-3)
