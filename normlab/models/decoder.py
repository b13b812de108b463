"""`Decoder`: a causal language model (GPT-style) built from a scheme."""

from __future__ import annotations

import torch

from normlab.errors import NormLabError
from normlab.models.cache import KVCache
from normlab.models.config import DecoderConfig
from normlab.models.sampling import sample
from normlab.models.tokens import TokenModel


class Decoder(TokenModel):
    """A causal language model: `decoder(tokens)` returns logits, `decoder.loss(tokens, targets)` the training loss."""

    causal = True

    config: DecoderConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DecoderConfig, *, device: torch.device | str | None = None):
        super().__init__(config, device=device)

    def features(
        self,
        inputs: torch.Tensor,
        *,
        documents: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """The head's input (B, T, D). `documents` (B, T) numbers the documents packed into each row."""
        if cache is None:
            return self._states(inputs, documents)
        if documents is not None:
            raise NormLabError(
                "documents come without a cache: a cache holds one document a row; leave one of them out"
            )
        per_block = [{"cache": cache[k]} for k in range(self.config.depth)]
        hidden = self._states(inputs, None, seen=cache.length, per_block=per_block)
        cache.advance(inputs.shape[1])
        return hidden

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue `tokens` (B, T) by up to `max_new_tokens` sampled tokens; returns prompt and continuation.

        Temperature 0 is greedy. A row that has produced `stop` repeats it until all rows have.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise NormLabError(f"expected at least one token in every row of a prompt, got shape {tuple(tokens.shape)}")
        if max_new_tokens < 0:
            raise NormLabError(f"max_new_tokens must not be negative, got {max_new_tokens}")
        cache = self.new_cache(len(tokens), tokens.shape[1] + max_new_tokens) if use_cache else None
        stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        new = tokens
        for _ in range(max_new_tokens):
            logits = self(new if use_cache else tokens, cache=cache)[:, -1]
            chosen = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if stop is not None:
                chosen = torch.where(stopped, stop, chosen)
                stopped |= chosen == stop
            new = chosen.unsqueeze(1)
            tokens = torch.cat([tokens, new], dim=1)
            if bool(stopped.all()):
                break
        return tokens

    def new_cache(self, batch: int, length: int) -> KVCache:
        """An empty cache for `batch` rows of up to `length` tokens."""
        config, weight = self.config, self.embedding.weight
        heads = config.kv_heads or config.heads
        return KVCache(config.depth, batch, length, heads, config.width_of_head, weight.dtype, weight.device)
