"""Training steps of other trainers for `normlab bench step --peers`: nanoGPT's model, Hugging Face Llama, litgpt.

Each has the depth, width, heads, vocabulary and sequence length of ours and keeps its own architecture, loss and
grouping of weight decay. None clips gradients, and neither does ours: the step is the model, its loss and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normlab.bench.contender import Name, Training
from normlab.bench.gpt2 import GPT2
from normlab.errors import NormLabError
from normlab.models import DecoderConfig

# pyright: reportMissingImports=false

_LOGIT_BYTES = 2 + 4 + 4
"""Bytes per logit where the loss is computed from all of them: in bf16, in fp32, and their gradient."""


@dataclass(frozen=True)
class Peer:
    """The training step of another trainer, for a model of the size of `config`."""

    label: str
    package: str | None
    """The package that it needs; None: it is written here."""
    make: Callable[[DecoderConfig, torch.device], Training]
    config: DecoderConfig

    graphs = False
    """None of these trainers records its step."""

    @property
    def name(self) -> Name:
        return self.label, "torch.compile"

    def check(self, batch: int) -> None:
        if self.package is not None and find_spec(self.package) is None:
            raise NormLabError(f"{self.package} is not installed; try pip install {self.package}")

    def extra_bytes(self, batch: int) -> int:
        return _LOGIT_BYTES * batch * self.config.max_length * self.config.vocab_size

    def build(self, device: torch.device) -> Training:
        return self.make(self.config, device)


def peers(config: DecoderConfig) -> list[Peer]:
    """All peers of the size of a model, installed or not."""
    makers = (("nanogpt", None, nanogpt), ("hf-llama", "transformers", hf_llama), ("litgpt", "litgpt", litgpt))
    return [Peer(label, package, make, config) for label, package, make in makers]


def nanogpt(config: DecoderConfig, device: torch.device) -> Training:
    """A GPT-2 as nanoGPT trains it, in an implementation of our own (gpt2.py)."""
    size = {"vocabulary": config.vocab_size, "length": config.max_length}
    model = GPT2(depth=config.depth, dim=config.dim, heads=config.heads, **size).to(device)
    compiled = torch.compile(model)
    return _training(model, lambda inputs, targets: compiled(inputs, targets)[1], _decay_matrices(model), config)


def hf_llama(config: DecoderConfig, device: torch.device) -> Training:
    """LlamaForCausalLM of transformers with its own loss, which shifts the labels itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.width_of_mlp,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.max_length,
    }
    with device:
        model = LlamaForCausalLM(LlamaConfig(**size, use_cache=False, **_SDPA))
    compiled = torch.compile(model)

    # Its last position has no label, and costs as much as with one.
    def loss(inputs: Tensor, _: Tensor) -> Tensor:
        return compiled(input_ids=inputs, labels=inputs).loss

    return _training(model, loss, _decay_matrices(model), config)


_SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
"""An option that Hugging Face's configurations take without declaring it."""


def litgpt(config: DecoderConfig, device: torch.device) -> Training:
    """litgpt's GPT as a Llama, with the loss of its `pretrain`, which compiles the model alone; without Fabric."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    size = Config(
        block_size=config.max_length,
        n_layer=config.depth,
        n_embd=config.dim,
        n_head=config.heads,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        intermediate_size=config.width_of_mlp,
        **_LITGPT_LLAMA,
    )
    model = GPT(size).to(device)
    model.apply(model._init_weights)
    compiled = torch.compile(model)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    return _training(model, lambda inputs, targets: chunked_cross_entropy(compiled(inputs), targets), groups, config)


_LITGPT_LLAMA: dict[str, Any] = {
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "bias": False,
    "rotary_percentage": 1.0,
}  # fmt: skip
"""What makes litgpt's model a Llama; without it, it is a GPT-NeoX."""


def _training(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], groups: list[dict[str, Any]], config: DecoderConfig
) -> Training:
    optimiser = torch.optim.AdamW(groups, lr=6e-4, fused=True)
    flops = flops_per_token(model, depth=config.depth, dim=config.dim, length=config.max_length)
    return Training(model=model, loss=loss, optimiser=optimiser, flops_per_token=flops)


def _decay_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters: weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def flops_per_token(model: nn.Module, *, depth: int, dim: int, length: int) -> int:
    """Training FLOPs per token as `DecoderConfig.flops_per_token` counts them, for a model of any kind.

    6 × parameters without those that are only looked up (positions, an embedding that is not the head's matrix as
    well), plus 12 × depth × width × length for attention.
    """
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    looked_up = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    idle = sum(weight.numel() for weight in looked_up if id(weight) not in heads)
    return 6 * (sum(p.numel() for p in model.parameters()) - idle) + 12 * depth * dim * length
