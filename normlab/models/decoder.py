"""The decoder: a language model built from a scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.attention import Attention
from normlab.models.cache import KVCache
from normlab.models.config import DecoderConfig
from normlab.models.cross_entropy import Loss, chunked_cross_entropy
from normlab.models.documents import document_mask, document_positions
from normlab.models.head import Head
from normlab.models.mlp import MLP
from normlab.models.moe import MoE
from normlab.models.rotary import rotary_table
from normlab.models.sampling import sample
from normlab.roles import Role, find_roles
from normlab.schemes.needs import meet
from normlab.stack import Stack, initialise_

_STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sublayers(config: DecoderConfig) -> tuple[nn.Module, nn.Module]:
    """The attention and the MLP of one block."""
    attention = Attention(config.dim, config.heads, config.kv_heads, config.head_dim, config.bias)
    if not config.experts:
        return attention, MLP(config.dim, config.width_of_mlp, config.mlp, config.bias)
    if config.bias:
        raise NormLabError("experts have no biases; leave bias off, or experts at 0")
    moe = MoE(
        config.dim,
        config.width_of_mlp,
        config.experts,
        config.top_k,
        config.mlp,
        shared_hidden=config.shared_hidden,
        # A single weight that is made to sum to one is one: the router would not learn from the loss.
        renormalise=config.top_k > 1,
    )
    return attention, moe


class Decoder(nn.Module):
    """A language model: `decoder(tokens)` returns logits, `decoder.loss(tokens, targets)` what to train on.

    It is always laid out on the meta device first and initialised in one pass by role, so that building it there and
    materialising it later (`to_empty`, `init_`) gives the same weights, bit for bit, from the same seed.
    """

    def __init__(self, config: DecoderConfig, *, device: torch.device | str | None = None):
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.stack = Stack(
                config.scheme,
                [sublayers(config) for _ in range(config.depth)],
                config.dim,
                topology=config.topology,
                checkpointing=config.checkpointing,
                kernels=config.kernels,
            )
            self.head = Head(config.dim, config.vocab_size, tied=config.tied_head)
            scheme = self.stack.scheme
            meet([need for need in scheme.needs if need.in_head], [self.head], who=scheme.name)
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta":
            self.to_empty(device=target)
            self.init_()

    def forward(
        self, tokens: torch.Tensor, *, documents: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Logits (B, T, V) for tokens (B, T). `documents` numbers the documents packed into each row."""
        return self.head(self.features(tokens, documents=documents, cache=cache), self.embedding.weight)

    def features(
        self, tokens: torch.Tensor, *, documents: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """What the head reads: (B, T, D), after the exit."""
        self._check(tokens, documents, cache)
        seen = 0 if cache is None else cache.length
        if documents is None:
            positions, mask = torch.arange(seen, seen + tokens.shape[1], device=tokens.device), None
        else:
            positions, mask = document_positions(documents), document_mask(documents)
        per_block = None if cache is None else [{"cache": cache[k]} for k in range(self.config.depth)]
        hidden = self.transform(self.embedding(tokens), positions, mask=mask, per_block=per_block)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return hidden

    def transform(self, embedded: torch.Tensor, positions: torch.Tensor, **to_stack: Any) -> torch.Tensor:
        """From embeddings (B, T, D) at positions (T,) or (B, T) to what the head reads; the rest goes to the stack."""
        config = self.config
        state = embedded if config.stream == "auto" else embedded.to(_STREAMS[config.stream])
        table = rotary_table(positions, config.width_of_head, config.rope_theta, dtype=_table_dtype(state))
        return self.stack(state, rotary=table, **to_stack)

    def loss(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        documents: torch.Tensor | None = None,
        z_loss: float = 0.0,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """What to train on: mean cross-entropy in nats over targets other than −100, with the losses that go with it.

        `z_loss` weighs the mean square of the logits' log-normaliser; experts add their routers' losses. The logits are
        never all there at once: `chunk` tokens at a time, as many as do well if that is left out.
        """
        loss = self._cross_entropy(tokens, targets, documents, z_loss, chunk).loss
        return loss + self.router_loss() if self.config.experts else loss

    def cross_entropy(
        self, tokens: torch.Tensor, targets: torch.Tensor, *, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What to report: the mean cross-entropy alone."""
        return self._cross_entropy(tokens, targets, documents, 0.0, None).loss

    def _cross_entropy(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        documents: torch.Tensor | None,
        z_loss: float,
        chunk: int | None,
    ) -> Loss:
        hidden = self.features(tokens, documents=documents).flatten(0, 1)
        weight = self.embedding.weight if self.head.weight is None else self.head.weight
        return chunked_cross_entropy(
            hidden,
            weight,
            targets.flatten(),
            logit_transform=self.head.logit_scale,
            z_loss=z_loss,
            chunk=chunk,
            kernels=self.config.kernels,
        )

    def router_loss(self) -> torch.Tensor:
        """Weighted load-balancing and z-loss of the last forward pass, averaged over blocks."""
        found = [module.routing for module in self.modules() if isinstance(module, MoE)]
        routings = [routing for routing in found if routing is not None]
        if not routings:
            raise NormLabError("no routing to speak of: expected a model with experts, after a forward pass")
        balance = torch.stack([routing.balance_loss for routing in routings]).mean()
        z = torch.stack([routing.z_loss for routing in routings]).mean()
        return self.config.balance_weight * balance + self.config.router_z_weight * z

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
        """`tokens` (B, T) continued by up to `max_new_tokens`.

        Temperature 0 is greedy. A row that has produced `stop` repeats it until all rows have.
        """
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

    def find_roles(self) -> list[Role]:
        """The role of every parameter."""
        return find_roles(self)

    def init_(self, *, generator: torch.Generator | None = None) -> Decoder:
        """Initialise every parameter as config and scheme say."""
        options = {"std": self.config.init_std, "zero_outputs": self.config.zero_outputs, "generator": generator}
        initialise_(self, self.stack.bound, self.find_roles(), **options)
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for an optimiser, every parameter in exactly one."""
        return self.stack.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        if self.stack.bound.constrains:
            self.stack.bound.after_step(self.find_roles())

    def _check(self, tokens: torch.Tensor, documents: torch.Tensor | None, cache: KVCache | None) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise NormLabError(f"expected tokens as integers (batch, length), got {tokens.dtype} {tuple(tokens.shape)}")
        length = tokens.shape[1] + (0 if cache is None else cache.length)
        if length > self.config.max_length:
            raise NormLabError(f"{length} tokens exceed max_length={self.config.max_length}; raise it in the config")
        if documents is not None and (documents.shape != tokens.shape or cache is not None):
            raise NormLabError(
                f"documents must have the shape of tokens {tuple(tokens.shape)} and come without a cache, "
                f"got {tuple(documents.shape)}"
            )


def _table_dtype(state: torch.Tensor) -> torch.dtype:
    return torch.float64 if state.dtype == torch.float64 else torch.float32
