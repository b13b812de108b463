"""Small models of other people, built offline from their configuration classes, each with a batch that has labels."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB, LENGTH = 61, 12
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}

# Name: configuration, model, path and length of each stack.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2},
        {"transformer.h": 3},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, {"model.layers": 3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED, {"model.layers": 3}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED, {"model.layers": 3}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**SIZE, "num_key_value_heads": 2}, {"model.layers": 3}),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED, {"model.layers": 3}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZE, {"gpt_neox.layers": 3}),
    "bert": ("BertConfig", "BertForMaskedLM", SIZE, {"bert.encoder.layer": 3}),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 4, "num_labels": 5},
        {},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
         "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        {"encoder.block": 3, "decoder.block": 2},
    ),
}  # fmt: skip


def hugging_face(name: str, **options: Any) -> nn.Module:
    """The model at random weights, in evaluation mode so that dropout does not blur comparisons."""
    config, model, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **options})).eval()


def batch_for(name: str, batch: int = 2, seed: int = 3) -> dict[str, torch.Tensor]:
    """What the model is called with, labels included."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        labels = torch.randint(0, 5, (batch,), generator=generator)
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator), "labels": labels}
    tokens = torch.randint(3, VOCAB, (batch, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
