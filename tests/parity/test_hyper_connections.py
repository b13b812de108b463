"""transformers 5.22: the decoder layers of DeepSeek-V4, GLM-5-next and HY-V4 are `mhc`, at random coefficients.

Their layers run with our branches in place of attention and MLP; what mixes the streams is their code. It casts to
float32 whatever it is given, so these casts are widened to float64 (`NoFloat32`).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import normlab
from normlab.schemes.contract.streams import mix_streams

from .compare import WRONG, check, module_differences, scatter_, states, tolerance
from .test_transformers import NoFloat32

deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")

D, DEPTH, STREAMS = 12, 3, 4
CONFIG = SimpleNamespace(
    hidden_size=D, hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hc_magnitude=2.0
)


class Branch(nn.Module):
    """Mixes tokens and channels; nobody's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x + x.mean(1, keepdim=True))))


class AsAttention(nn.Module):
    """A branch with the results of their attention: DeepSeek-V4's are two, HY-V4's three."""

    def __init__(self, branch: Branch, results: int):
        super().__init__()
        self.branch, self.results = branch, results

    def forward(self, hidden_states: torch.Tensor, *_positions, **_ignored) -> tuple:
        return (self.branch(hidden_states), *[None] * (self.results - 1))


class AsMLP(nn.Module):
    def __init__(self, branch: Branch):
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor, **_ignored) -> torch.Tensor:
        return self.branch(x)


@dataclasses.dataclass(frozen=True)
class Model:
    layer: type
    connection: type
    norm: type
    head: type
    results: int


MODELS = {
    "deepseek-v4": Model(
        deepseek.DeepseekV4DecoderLayer,
        deepseek.DeepseekV4HyperConnection,
        deepseek.DeepseekV4RMSNorm,
        deepseek.DeepseekV4HyperHead,
        2,
    ),
    # The layer of GLM-5-next holds other attention; its connection and its head are what differs.
    "glm-5-next": Model(
        deepseek.DeepseekV4DecoderLayer,
        glm.Glm5NextTextHyperConnection,
        deepseek.DeepseekV4RMSNorm,
        glm.Glm5NextTextHyperHead,
        2,
    ),
    "hy-v4": Model(hy.HYV4DecoderLayer, hy.HYV4HyperConnection, hy.HYV4RMSNorm, hy.HYV4HyperHead, 3),
}


def their_layer(model: Model, branches: list[Branch]) -> nn.Module:
    layer = model.layer.__new__(model.layer)
    nn.Module.__init__(layer)
    layer.self_attn, layer.mlp = AsAttention(branches[0], model.results), AsMLP(branches[1])
    layer.input_layernorm, layer.post_attention_layernorm = model.norm(D), model.norm(D)
    layer.attn_hc, layer.ffn_hc = model.connection(CONFIG), model.connection(CONFIG)
    return layer


def their_network(model: Model, blocks: list[list[Branch]]) -> nn.ModuleList:
    head = model.head() if model.head is glm.Glm5NextTextHyperHead else model.head(CONFIG)
    return nn.ModuleList([*(their_layer(model, pair) for pair in blocks), head, model.norm(D)])


@torch.no_grad()
def randomise_(network: nn.ModuleList) -> None:
    """Coefficients far from their start: logits of order one, so that rows of comb do not sum to one by symmetry."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in network.named_parameters():
        if name.endswith(("fn", "base", "scale")):
            size = 1.5 / (STREAMS * D) ** 0.5 if name.endswith("fn") else 1.0
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    scatter_([norm.weight for norm in network.modules() if type(norm).__name__.endswith("RMSNorm") and _gain(norm)])


def _gain(norm: nn.Module) -> bool:
    return getattr(norm, "weight", None) is not None


def run_theirs(network: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    *layers, head, final = network
    streams = x.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
    for layer in layers:
        found = layer(streams)
        streams = found[0] if isinstance(found, tuple) else found
    return final(head(streams))


@torch.no_grad()
def pair_up(theirs: nn.ModuleList, stack: normlab.Stack) -> dict[nn.Parameter, nn.Parameter]:
    """Copy their parameters into ours; returns which parameter of ours stands for which of theirs."""
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    *layers, head, final = theirs
    for layer, ours in zip(layers, stack.layers, strict=True):
        attention, mlp = ours.block.steps
        for step, connection, norm in (
            (attention, layer.attn_hc, layer.input_layernorm),
            (mlp, layer.ffn_hc, layer.post_attention_layernorm),
        ):
            pairs.append((norm.weight, step.read.norm.weight))
            pairs += _logit_pairs(connection, step.read.logits, "")
    pairs.append((final.weight, stack.exit.norm.weight))
    if hasattr(head, "hc_fn"):
        pairs += _logit_pairs(head, stack.exit.logits, "hc_")
    for their, our in pairs:
        our.copy_(their)
    return dict(pairs)


def _logit_pairs(theirs, ours, prefix: str) -> list[tuple[nn.Parameter, nn.Parameter]]:
    names = {"fn": ours.project.weight, "base": ours.base, "scale": ours.scale}
    return [(getattr(theirs, prefix + name), parameter) for name, parameter in names.items()]


def compare(name: str, **options) -> dict[str, float]:
    torch.manual_seed(0)
    blocks = [[Branch(), Branch()] for _ in range(DEPTH)]
    theirs = their_network(MODELS[name], blocks).double()
    randomise_(theirs)
    stack = normlab.Stack(normlab.scheme(name, **options), blocks, D, residual_only=True).double()
    with NoFloat32():
        counterpart = pair_up(theirs, stack)
        return module_differences(theirs, stack, states(D), counterpart, lambda x: run_theirs(theirs, x))


@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradients_match(name: str):
    check(compare(name), tolerance())


def test_the_other_side_of_the_matrix_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    """comb·X for combᵀX, the fault of several public implementations."""
    monkeypatch.setattr("normlab.schemes.mhc.mix_streams", lambda comb, x: mix_streams(comb.mT, x))
    found = compare("deepseek-v4")
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek-v4", {"rounds": 1}),
        ("deepseek-v4", {"magnitude": 1.9}),
        ("deepseek-v4", {"mix_eps": 1e-2}),
        ("hy-v4", {"magnitude": 1.9}),
    ],
)
def test_other_options_are_told_apart(name: str, options: dict):
    found = compare(name, **options)
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG


@pytest.mark.parametrize("name", MODELS)
def test_coefficients_start_where_their_models_start(name: str):
    """HY-V4 starts with the mean of the streams and updates of weight one; we start all of them there."""
    stack = normlab.Stack(name, [[Branch(), Branch()]], D, residual_only=True)
    read = stack.layers[0].block.steps[0].read
    _, post, *comb = read(torch.randn(1, 1, STREAMS, D))
    assert torch.allclose(post, torch.ones_like(post), atol=2e-6)
    assert all(torch.allclose(c, torch.full_like(c, 1 / STREAMS), atol=2e-6) for c in comb)
