"""Tiny models of published architectures, made offline from the library's configurations."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

VOCABULARY, WIDTH, DEPTH = 61, 32, 2
# Tokens that mean something, behind those that are used: by default many lie beyond any small vocabulary.
SPECIAL = {"pad_token_id": 60, "bos_token_id": 59, "eos_token_id": 58}
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": VOCABULARY, **SPECIAL}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GEMMA = "peri(gain='offset', entry_norm=False)"


@dataclass(frozen=True)
class Architecture:
    """How a model is made, and what it is."""

    model: str
    config: str
    options: dict[str, Any]
    scheme: str
    topology: str = "serial"
    exact: bool = True
    """Whether it adds in the order in which our block does."""
    roles: dict[str, str] = field(default_factory=dict)

    def build(self, **changes: Any) -> Any:
        torch.manual_seed(0)
        config = configuration(self.config, **(self.options | changes))
        return scatter_(model_class(self.model, config)(config)).eval()


def configuration(name: str, **options: Any) -> Any:
    """One of the library's configurations."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    try:
        kind()
    except StrictDataclassError as error:
        # Olmo's of transformers 5.4, with a huggingface-hub that is newer.
        pytest.skip(f"transformers {transformers.__version__}: {name} refuses its own defaults: {error}")
    return kind(**options)


def model_class(name: str, config: Any) -> Any:
    """One of the library's model classes, of which some are in the module beside the configuration alone."""
    beside = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return getattr(transformers, name, None) or getattr(beside, name)


LAYER = "norm='layer', eps=1e-05, bias=True"
BERT = "norm='layer', eps=1e-12, bias=True"
OPT = {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
OPT.pop("intermediate_size")
VISION = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GEMMA4 = GROUPED | {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
LINEAR = {"layer_types": ["linear_attention", "indexed_attention"]}
DEEPSEEK = TEXT | EXPERTS | {
    "head_dim": 16, "q_lora_rank": 16, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 4, "sliding_window": 8, "partial_rotary_factor": 0.5,
}  # fmt: skip
DEEPSEEK.pop("intermediate_size")
HY = TEXT | {"num_key_value_heads": 4} | EXPERTS | LATENT | {
    "head_dim": 8, "n_routed_experts": 4, "qk_rope_head_dim": 8, "index_topk": 4, "index_head_dim": 8
}  # fmt: skip
GLM = TEXT | {"num_key_value_heads": 4} | EXPERTS | LATENT | LINEAR | {
    "n_routed_experts": 4, "index_topk": 32, "index_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
}  # fmt: skip
QWEN4 = GROUPED | EXPERTS | LINEAR | {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "hc_lowrank": 8,
    "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16, "num_experts": 4, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
}  # fmt: skip
QWEN4.pop("intermediate_size")
MUSE = GROUPED | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "moe_hidden_size": 16}

ZOO = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED, "pre"),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", GROUPED, "pre"),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}, "pre"),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 4}, "pre"),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}, "pre(eps=1e-05)"
    ),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", GROUPED | {"residual_multiplier": 0.3}, "pre"),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "n_positions": 32, **SPECIAL},
        f"pre({LAYER})",
    ),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", OPT, f"pre({LAYER})"),
    "opt-350m": Architecture("OPTForCausalLM", "OPTConfig", OPT | {"do_layer_norm_before": False}, f"post({LAYER})"),
    "neox": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, f"pre({LAYER})", "parallel", roles={"*query_key_value.weight": "q"}
    ),
    "neox-serial": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT | {"use_parallel_residual": False}, f"pre({LAYER})"
    ),
    "gptj": Architecture(
        "GPTJForCausalLM", "GPTJConfig",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "rotary_dim": 4, **SPECIAL},
        f"pre({LAYER})", "parallel",
    ),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", TEXT, f"pre({LAYER})", "parallel"),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", TEXT, f"pre({LAYER})", "parallel"),
    "falcon-40b": Architecture(
        "FalconForCausalLM", "FalconConfig", TEXT | {"new_decoder_architecture": True, "num_kv_heads": 2},
        f"pre({LAYER})", "parallel",
    ),
    "cohere": Architecture(
        "CohereForCausalLM", "CohereConfig", GROUPED, "pre(norm='layer', eps=1e-05)", "parallel", exact=False
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}, GEMMA),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8}, GEMMA),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", GROUPED, "output(eps=1e-05)"),
    "bert": Architecture("BertForMaskedLM", "BertConfig", TEXT, f"post({BERT})"),
    "distilbert": Architecture(
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 48, "n_layers": DEPTH, "n_heads": 4, "pad_token_id": 60},
        f"post({BERT})",
    ),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", VISION, f"pre({BERT})"),
    "nanochat": Architecture("NanoChatForCausalLM", "NanoChatConfig", GROUPED, "pre(gain='none')"),
    "gemma4": Architecture("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4, "peri(entry_norm=False)"),
    "muse-spark": Architecture(
        "MuseSparkTextModel", "MuseSparkTextConfig", MUSE,
        "highway(eps=1e-05, gain='offset', keep='variance', gate_bias=0.0, temperature=0.3, output_gain=False,"
        " entry_norm=False)",
    ),
    "deepseek-v4": Architecture("DeepseekV4ForCausalLM", "DeepseekV4Config", DEEPSEEK, "mhc"),
    "hy-v4": Architecture("HYV4ForCausalLM", "HYV4Config", HY, "mhc(eps=1e-05, mixing='none')"),
    "glm-5-next": Architecture("Glm5NextTextModel", "Glm5NextTextConfig", GLM, "mhc(eps=1e-05, merge='mean')"),
    "qwen4": Architecture("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", QWEN4, "gated(gain='offset', rank=8)"),
    "clip": Architecture("CLIPVisionModel", "CLIPVisionConfig", VISION, f"pre({LAYER})"),
}  # fmt: skip

NAMED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt2",
    "neox",
    "gemma2",
    "gemma3",
    "olmo2",
    "bert",
    "vit",
    "phi",
    "falcon",
)
"""The architectures that are tested in every way."""


def scatter_(model: Any) -> Any:
    """Gains and biases off their round numbers, so that one in another's place is seen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Gemma 4's factor on the state is a buffer.
        numbers = [buffer for buffer in model.buffers() if buffer.ndim == 1 and buffer.numel() == 1]
        for parameter in (*model.parameters(), *numbers):
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(model: Any, padding: str = "none", batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Tokens, the second sequence shorter than the first where there is padding, or images."""
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator).to(model.dtype)}
    tokens = torch.randint(0, 50, (batch, length), generator=generator)
    if padding == "none":
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[1, slice(-3, None) if padding == "right" else slice(3)] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 60), "attention_mask": mask}


def answer(output: Any) -> torch.Tensor:
    """What the model says."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
