"""transformers 5: Gemma 2's layer is peri with gains kept as offsets from one, OLMo 2's is output-norm.

Both compute norms and softmax in float32 whatever they are given. As shipped they are compared in float32; to see
further, the same code runs with these casts widened to float64.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Gemma2Config, Olmo2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RMSNorm

import normlab

from .compare import WRONG, T, check, copy_gains, module_differences, scatter_, states, tolerance

D, HEAD_DIM, EPS = 32, 16, 1e-5
SIZES = {
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": EPS,
    "attn_implementation": "eager",
}
NORMS = {
    "gemma2": [f"{place}_layernorm" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")],
    "olmo2": ["post_attention_layernorm", "post_feedforward_layernorm"],
}


class NoFloat32(TorchFunctionMode):
    """Every request for float32 asks for float64 instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


class UpdateAlone(nn.Module):
    """Their attention returns its weights too."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, **options) -> torch.Tensor:
        return self.attention(x, **options)[0]


def layers(model: str) -> nn.ModuleList:
    """Two layers and the final norm."""
    if model == "gemma2":
        config = Gemma2Config(**SIZES, head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM)
        return nn.ModuleList([*(Gemma2DecoderLayer(config, k) for k in range(2)), Gemma2RMSNorm(D, EPS)])
    config = Olmo2Config(**SIZES)
    return nn.ModuleList([*(Olmo2DecoderLayer(config, k) for k in range(2)), Olmo2RMSNorm(D, EPS)])


def context(dtype: torch.dtype) -> dict:
    """Rotary table and causal mask, which their models pass to every layer."""
    angles = torch.arange(T)[:, None] * 0.1 ** torch.arange(HEAD_DIM // 2).repeat(2)
    mask = torch.full((T, T), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return {"position_embeddings": (angles.cos()[None].to(dtype), angles.sin()[None].to(dtype)), "attention_mask": mask}


def compare(model: str, scheme: str, dtype: torch.dtype = torch.float64, gain: str = "plain") -> dict[str, float]:
    theirs = layers(model).to(dtype)
    *blocks, final = theirs
    gains = [getattr(layer, name).weight for layer in blocks for name in NORMS[model]] + [final.weight]
    scatter_(gains)
    branches = [(UpdateAlone(layer.self_attn), layer.mlp) for layer in blocks]
    stack = normlab.Stack(normlab.scheme(scheme, eps=EPS, gain=gain), branches, D).to(dtype)
    counterpart = copy_gains(stack, gains, offset=1.0 if model == "gemma2" else 0.0)
    around = context(dtype)

    def run_theirs(x: torch.Tensor) -> torch.Tensor:
        for layer in blocks:
            x = layer(x, **around)
        return final(x)

    with NoFloat32() if dtype == torch.float64 else contextlib.nullcontext():
        x = states(D, dtype)
        return module_differences(theirs, stack, x, counterpart, run_theirs, lambda x: stack(x, **around))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
# OLMo 2's attention brings its own query and key norms, so our scheme must not ask for them.
@pytest.mark.parametrize(
    ("model", "scheme", "gain"), [("gemma2", "peri(entry_norm=False)", "offset"), ("olmo2", "output", "plain")]
)
def test_value_and_gradients_match(model: str, scheme: str, gain: str, dtype: torch.dtype):
    check(compare(model, scheme, dtype, gain), tolerance(dtype))


@pytest.mark.parametrize(("model", "scheme"), [("gemma2", "peri(entry_norm=False, step=0.9)"), ("olmo2", "pre")])
def test_another_scheme_is_told_apart(model: str, scheme: str):
    found = compare(model, scheme)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG
