"""`TokenModel`: what decoder and encoder share, which is everything but the attention mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.config import TokenConfig
from normlab.models.head import Head
from normlab.models.rotary import rotary_table
from normlab.models.transformer import Transformer


class TokenModel(Transformer):
    """Maps tokens (B, T) to logits (B, T, V), with rotary positions.

    If document numbers are given, attention stays within a document and positions restart at each.
    """

    causal: ClassVar[bool]
    """Whether attention is causal."""

    config: TokenConfig
    embedding: nn.Embedding

    def _new_embedding(self) -> nn.Module:
        return nn.Embedding(self.config.vocab_size, self.config.dim)

    def _new_head(self) -> Head:
        return Head(self.config.dim, self.config.vocab_size, tied=self.config.tied_head)

    @property
    def _head_matrix(self) -> torch.Tensor:
        return self.embedding.weight if self.head.weight is None else self.head.weight

    def example(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(batch, length, dtype=torch.long, device="cpu")
        return tokens, tokens

    def products_outside(self) -> int:
        # An embedding is a look-up, not a product.
        return self._head_matrix.numel() + sum(p.numel() for n, p in self.head.named_parameters() if n != "weight")

    def _states(
        self,
        tokens: torch.Tensor,
        documents: torch.Tensor | None,
        *,
        seen: int = 0,
        per_block: Sequence[Mapping[str, Any]] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the exit; `seen` is the number of earlier tokens in the cache."""
        self._check(tokens, documents, seen)
        if documents is None:
            positions, mask = torch.arange(seen, seen + tokens.shape[1], device=tokens.device), None
        else:
            positions, mask = document_positions(documents), document_mask(documents, causal=self.causal)
        return self.transform(self.embedding(tokens), positions, mask=mask, per_block=per_block)

    def transform(self, embedded: torch.Tensor, positions: torch.Tensor, **to_stack: Any) -> torch.Tensor:
        """Run the stack on embeddings (B, T, D) at positions (T,) or (B, T); returns the head's input."""
        config, state = self.config, self._in_stream(embedded)
        table = rotary_table(positions, config.width_of_head, config.rope_theta, dtype=_table_dtype(state))
        return self.stack(state, rotary=table, causal=self.causal, **self._to_attention(), **to_stack)

    def _check(self, tokens: torch.Tensor, documents: torch.Tensor | None, seen: int) -> None:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise NormLabError(f"expected tokens as integers (batch, length), got {tokens.dtype} {tuple(tokens.shape)}")
        length = tokens.shape[1] + seen
        if length > self.config.max_length:
            raise NormLabError(f"{length} tokens exceed max_length={self.config.max_length}; raise it in the config")
        if documents is not None and documents.shape != tokens.shape:
            raise NormLabError(
                f"documents must have the shape of tokens {tuple(tokens.shape)}, got {tuple(documents.shape)}"
            )


def _table_dtype(state: torch.Tensor) -> torch.dtype:
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def document_positions(documents: torch.Tensor) -> torch.Tensor:
    """Positions that restart at zero in every document of a packed sequence.

    `documents` (B, T) holds a number for each token that is equal within a document.
    """
    index = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    start = torch.where(begins, index, torch.zeros_like(index)).cummax(-1).values
    return index - start


def document_mask(documents: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Attention mask (B, 1, T, T) for packed documents: True where a query may attend to a key."""
    T = documents.shape[-1]
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    if causal:
        same = same & torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return same.unsqueeze(-3)
