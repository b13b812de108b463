"""Multi-head softmax attention with grouped queries, rotary positions, a KV cache and slots for a scheme's norms.

Formula    q, k, v = split(W_qkv x);  q, k ← M(R(N_q q)), M(R(N_k k));  v ← N_v v
           F(x) = W_o concat_h softmax(s · q_h k_hᵀ + mask) v_h
Slots      q-norm N_q, k-norm N_k, v-norm N_v, qk-after-rotary M (one module for both), softmax-scale s = 1/√head_dim
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels.rotary import Table, rotate, rotated_heads
from normlab.models.sublayer import Sublayer, check_positive, project, runs_as_written, through
from normlab.models.value_residual import FirstValues, ValueMix
from normlab.roles import Part, Spec


class LayerStore(Protocol):
    """Interface of one layer's KV cache: NormLab's `LayerCache`, or another library's."""

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v (B, T, kv_heads, head_dim); returns all keys and values so far."""
        ...


class Mixer(Protocol):
    """Interface of a replacement for softmax(scale · q kᵀ + mask) v, with heads as (B, T, heads, head_dim)."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor: ...


class Attention(Sublayer):
    """Attention with `heads` query heads and `kv_heads` key and value heads.

    Modules in the slots receive (..., heads, head_dim).
    """

    branch_kind = "attention"
    offers = frozenset({"q-norm", "k-norm", "v-norm", "qk-after-rotary", "softmax-scale"})

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        check_positive("attention", dim=dim, heads=heads, kv_heads=self.kv_heads)
        self.head_dim = _even_share(dim, heads) if head_dim is None else head_dim
        check_positive("attention", head_dim=self.head_dim)
        if heads % self.kv_heads:
            raise NormLabError(
                f"attention: {heads} heads cannot share {self.kv_heads} kv_heads; expected kv_heads to divide heads; "
                f"try {_largest_divisor(heads, self.kv_heads)}"
            )
        self.qkv = nn.Linear(dim, (heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.v_norm: nn.Module | None = None
        self.qk_after_rotary: nn.Module | None = None
        self.softmax_scale: float | None = None
        self.value_mix: ValueMix | None = None

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Table | None = None,
        mask: torch.Tensor | None = None,
        causal: bool = True,
        cache: LayerStore | None = None,
        mixer: Mixer | None = None,
        first_values: FirstValues | None = None,
    ) -> torch.Tensor:
        """The attention output for x (B, T, dim). `mask`, True where a query may attend to a key, replaces `causal`.

        A `mixer` replaces torch's scaled_dot_product_attention and interprets the mask itself. `first_values` keeps the
        first block's values for the later ones, which have a `value_mix`.
        """
        q, k, v = self._queries_keys_values(x, rotary)
        if first_values is not None:
            v = first_values.mixed(v, self.value_mix)
        elif self.value_mix is not None:
            raise NormLabError("attention: value residual needs first_values, which the model passes; call the model")
        if cache is not None:
            k, v = cache.append(k, v)
        # Norms and caches may return another dtype than the projection; the product needs one dtype.
        k, v = k.to(q.dtype), v.to(q.dtype)
        mixed = self._attend(q, k, v, mask, causal) if mixer is None else mixer(q, k, v, mask, self.scale)
        return project(mixed.flatten(-2), self.out)

    @property
    def casts_input(self) -> bool:
        # Not if a subclass, or a wrapper such as LoRA in the projection's place, may do more with the input.
        return runs_as_written(self, Attention) and runs_as_written(self.qkv, nn.Linear)

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def _queries_keys_values(self, x: torch.Tensor, rotary: Table | None) -> tuple[torch.Tensor, ...]:
        fused = project(x, self.qkv)
        if rotary is not None and not self._normalises():
            return rotated_heads(fused, rotary, self.heads, self.kv_heads, kernels=self.kernels)
        fused = fused.unflatten(-1, (-1, self.head_dim))
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        q, k, v = through(self.q_norm, q), through(self.k_norm, k), through(self.v_norm, v)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k = through(self.qk_after_rotary, q), through(self.qk_after_rotary, k)
        return q.to(fused.dtype), k.to(fused.dtype), v.to(fused.dtype)

    def _normalises(self) -> bool:
        """Whether a slot holds a module that is applied to q, k or v."""
        slots = (self.q_norm, self.k_norm, self.v_norm, self.qk_after_rotary)
        return any(slot is not None for slot in slots)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        T, S = q.shape[1], k.shape[1]
        if mask is None and causal and 1 < T < S:
            mask = _causal_over_cache(T, S, q.device)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            # A single query is the newest token and attends to everything.
            is_causal=mask is None and causal and T > 1,
            scale=self.softmax_scale,
            enable_gqa=self.kv_heads < self.heads,
        )
        return mixed.transpose(1, 2)

    def _check_filling(self, need: str, module: nn.Module | float) -> None:
        if need != "softmax-scale":
            super()._check_filling(need, module)
        elif not isinstance(module, int | float) or not module > 0:
            raise NormLabError(f"slot 'softmax-scale' holds {module!r}; expected a positive number; try head_dim**-0.5")

    def parameter_roles(self) -> dict[str, Spec]:
        """Roles of the parameters (`normlab.roles`)."""
        rows, shared_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = [Part("q", 0, rows), Part("k", rows, shared_rows), Part("v", rows + shared_rows, shared_rows)]
        return {"qkv.weight": parts, "out.weight": "o"}


def _causal_over_cache(T: int, S: int, device: torch.device) -> torch.Tensor:
    # The T queries are the last of the S positions; torch's is_causal assumes that they are the first.
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def _even_share(dim: int, heads: int) -> int:
    if dim % heads:
        raise NormLabError(
            f"attention: {heads} heads do not divide dim {dim}; expected a divisor or an explicit head_dim; "
            f"try {_largest_divisor(dim, heads)} heads"
        )
    return dim // heads


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
