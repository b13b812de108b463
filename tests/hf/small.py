"""Small models of ours in the library's clothes, and what their numbers may differ by."""

from __future__ import annotations

from typing import Any

import torch

from normlab.hf import NormLabConfig, NormLabForCausalLM

VOCABULARY, LENGTH = 61, 9
SIZES: dict[str, Any] = {
    "depth": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY, "max_length": 64,
    # Far from zero: logits that hardly differ would agree by luck.
    "init_std": 0.2,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def make(scheme: str = "geonorm", *, seed: int = 0, **changes: Any) -> NormLabForCausalLM:
    """A model ready to evaluate, the same each time."""
    torch.manual_seed(seed)
    return NormLabForCausalLM(NormLabConfig(model={**SIZES, "scheme": scheme, **changes})).eval()


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """No padding among them, which is 0."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def tolerance(logits: torch.Tensor, depth: int = 3) -> float:
    """Two orders of the same sums: each of a layer's four products and four norms rounds once, and so does the head."""
    return (8 * depth + 1) * torch.finfo(logits.dtype).eps * max(1.0, float(logits.detach().abs().max()))


def close(found: torch.Tensor, expected: torch.Tensor, depth: int = 3) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(expected, depth))
