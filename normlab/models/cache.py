"""KV cache: preallocated keys and values of all layers, for generation."""

from __future__ import annotations

import torch

from normlab.errors import NormLabError


class KVCache:
    """Keys and values of every layer, (B, max_length, kv_heads, head_dim) each, of which `length` positions are filled.

    All layers of one forward pass append at the same `length`; the decoder calls `advance` once when they are done.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, 2, batch, max_length, kv_heads, head_dim)
        if min(shape) < 1:
            raise NormLabError(
                f"cache: sizes (layers, 2, B, length, heads, head_dim) are {shape}; expected positive ones"
            )
        self.max_length = max_length
        self.length = 0
        self._store = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [LayerCache(self, keys, values) for keys, values in self._store.unbind()]

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes(self) -> int:
        """Allocated memory in bytes, filled or not."""
        return self._store.nbytes

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has just appended."""
        self.length = self.end_after(tokens)

    def crop(self, length: int) -> None:
        """Discard all but the first `length` positions."""
        if not 0 <= length <= self.length:
            raise NormLabError(f"cache: cannot crop {self.length} positions to {length}; expected 0 to {self.length}")
        self.length = length

    def end_after(self, tokens: int) -> int:
        """The length after `tokens` more; raises if they do not fit."""
        if tokens < 0:
            raise NormLabError(f"cache: cannot advance by {tokens}; expected 0 or more; try crop")
        end = self.length + tokens
        if end > self.max_length:
            raise NormLabError(
                f"cache: {self.length} + {tokens} positions do not fit; expected at most {self.max_length}; "
                f"try max_length={end}"
            )
        return end


class LayerCache:
    """One layer's view of a KVCache."""

    def __init__(self, cache: KVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._cache, self._keys, self._values = cache, keys, values

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v (B, T, kv_heads, head_dim); returns all keys and values so far."""
        self._check(k)
        self._check(v)
        start, end = self._cache.length, self._cache.end_after(k.shape[1])
        self._keys[:, start:end] = k
        self._values[:, start:end] = v
        return self._keys[:, :end], self._values[:, :end]

    def _check(self, new: torch.Tensor) -> None:
        B, _, H, Dh = self._keys.shape
        if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (B, H, Dh):
            raise NormLabError(f"cache: got shape {tuple(new.shape)}; expected ({B}, tokens, {H}, {Dh})")
        # The next append overwrites memory that a backward pass would still need.
        if new.requires_grad:
            raise NormLabError("cache: cannot store tensors that need gradients; try torch.no_grad() around generation")
