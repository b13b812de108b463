"""transformers 5.22: Qwen4-Exp's decoder layer is `gated`, Muse Spark's is `highway`, at random coefficients.

Their layers run with our branches in place of attention and MLP; what is around them is their code, with its casts to
float32 widened to float64 (`NoFloat32`).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import normlab

from .compare import WRONG, check, module_differences, scatter_, states, tolerance
from .test_hyper_connections import AsAttention, AsMLP, Branch, D
from .test_transformers import NoFloat32

qwen = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
muse = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

DEPTH, STREAMS, RANK = 3, 4, 5
QWEN = SimpleNamespace(hidden_size=D, hc_count=STREAMS, hc_lowrank=RANK, rms_norm_eps=1e-6)
MUSE = SimpleNamespace(hidden_size=D, residual_gate_temperature=0.3)


def bare(cls: type) -> nn.Module:
    """A layer of theirs without its constructor."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    return layer


@torch.no_grad()
def randomise_(parameters, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in parameters:
        scale = size / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def copy_(pairs) -> dict[nn.Parameter, nn.Parameter]:
    for their, our in pairs:
        our.copy_(their)
    return dict(pairs)


# -- Qwen --------------------------------------------------------------------------------------------------------------


def qwen_layer(branches: list[Branch]) -> nn.Module:
    layer = bare(qwen.Qwen4ExpTextDecoderLayer)
    layer.layer_type, layer.ple = "full_attention", None
    layer.self_attn, layer.mlp = AsAttention(branches[0], 2), AsMLP(branches[1])
    layer.attn_hyper_connection = qwen.Qwen4ExpTextGatedResidual(QWEN)
    layer.mlp_hyper_connection = qwen.Qwen4ExpTextGatedResidual(QWEN)
    return layer


def read_pairs(theirs: nn.Module, ours: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    pairs = [
        (theirs.hc_norm.weight, ours.norm.affine.weight),
        (theirs.input_mix_weight_down.weight, ours.down.weight),
        (theirs.input_mix_weight_up.weight, ours.up.weight),
    ]
    injects = theirs.block_inject_weight is not None
    return [*pairs, (theirs.block_inject_weight.weight, ours.inject.weight)] if injects else pairs


def compare_qwen(**options) -> dict[str, float]:
    torch.manual_seed(0)
    blocks = [[Branch(), Branch()] for _ in range(DEPTH)]
    theirs = nn.ModuleList([*map(qwen_layer, blocks), qwen.Qwen4ExpTextGatedResidual(QWEN, use_combine=False)]).double()
    *layers, head = theirs
    connections = [c for layer in layers for c in (layer.attn_hyper_connection, layer.mlp_hyper_connection)] + [head]
    randomise_([p for c in connections for p in c.parameters()], size=3.0)
    scheme = normlab.scheme("gated", streams=STREAMS, rank=RANK, gain="offset", **options)
    stack = normlab.Stack(scheme, blocks, D, residual_only=True).double()
    reads = [step.read for layer in stack.layers for step in layer.block.steps] + [stack.exit]
    counterpart = copy_([pair for two in zip(connections, reads, strict=True) for pair in read_pairs(*two)])

    def run_theirs(x: torch.Tensor) -> torch.Tensor:
        flat = x.repeat(1, 1, STREAMS)
        for layer in layers:
            flat = layer(flat, position_embeddings=None)
        return head(flat)

    with NoFloat32():
        return module_differences(theirs, stack, states(D), counterpart, run_theirs)


def test_gated_residual_of_qwen():
    check(compare_qwen(), tolerance())


def test_another_epsilon_is_told_apart():
    found = compare_qwen(eps=1e-1)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG


# -- Muse Spark --------------------------------------------------------------------------------------------------------


class ScaledOutput(nn.Module):
    """Their norm after the MLP scales its input, which belongs to the branch: s⊙(W·x) = (s⊙W)·x."""

    def __init__(self, branch: Branch, offset: nn.Parameter):
        super().__init__()
        self.branch, self.offset = branch, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1.0 + self.offset) * self.branch(x)


def muse_layer(branches: list[Branch]) -> nn.Module:
    layer = bare(muse.MuseSparkTextDecoderLayer)
    layer.self_attn, layer.mlp = AsAttention(branches[0], 2), AsMLP(branches[1])
    layer.input_layernorm, layer.pre_feedforward_layernorm = (muse.MuseSparkTextCenteredRMSNorm(D) for _ in range(2))
    layer.post_attention_layernorm = muse.MuseSparkRMSNorm(D, with_scale=False)
    layer.post_feedforward_layernorm = muse.MuseSparkTextInputScaledRMSNorm(D)
    layer.post_attention_residual_gate, layer.post_feedforward_residual_gate = (
        muse.MuseSparkResidualGate(MUSE) for _ in range(2)
    )
    return layer


def compare_muse(**options) -> dict[str, float]:
    torch.manual_seed(0)
    blocks = [[Branch(), Branch()] for _ in range(DEPTH)]
    theirs = nn.ModuleList([*map(muse_layer, blocks), muse.MuseSparkTextCenteredRMSNorm(D)]).double()
    *layers, final = theirs
    gates = [g for layer in layers for g in (layer.post_attention_residual_gate, layer.post_feedforward_residual_gate)]
    randomise_([gate.gate for gate in gates])
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.pre_feedforward_layernorm)] + [final]
    scales = [layer.post_feedforward_layernorm.weight for layer in layers]
    scatter_([*(norm.weight for norm in norms), *scales])
    ours = [(a, ScaledOutput(m, scale)) for (a, m), scale in zip(blocks, scales, strict=True)]
    stack = normlab.Stack(normlab.scheme("muse-spark", entry_norm=False, **options), ours, D, residual_only=True)
    stack = stack.double()
    steps = [step for layer in stack.layers for step in layer.block.steps]
    pairs = [(gate.gate, step.write.gate.logit) for gate, step in zip(gates, steps, strict=True)]
    reads = [*(step.read for step in steps), stack.exit]
    pairs += [(norm.weight, read.weight) for norm, read in zip(norms, reads, strict=True)]
    counterpart = copy_(pairs)

    def run_theirs(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return final(x)

    with NoFloat32():
        return module_differences(theirs, stack, states(D), counterpart, run_theirs)


def test_residual_gate_of_muse_spark():
    check(compare_muse(), tolerance())


@pytest.mark.parametrize("options", [{"temperature": 0.4}, {"keep": "complement"}])
def test_other_gates_are_told_apart(options: dict):
    found = compare_muse(**options)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG
