"""MLP against its formula; slots; roles."""

import math

import pytest
import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.mlp import MLP
from normlab.roles import find_roles

EPS64 = torch.finfo(torch.float64).eps
# Values of order 1, sums of at most 3·7 = 21 terms in values and gradients, three products in a row.
TOLERANCE = {"rtol": 0.0, "atol": 3 * 21 * 10 * EPS64}


def mlp(kind: str, bias: bool = False) -> MLP:
    torch.manual_seed(0)
    return MLP(5, 7, kind, bias=bias).double()


def inputs() -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def written_out(layer: MLP, x: torch.Tensor, gate_factor: float = 1.0, up_factor: float = 1.0) -> torch.Tensor:
    """Sigmoid and error function spelled out, one row of the fused matrix at a time."""
    first = layer.gate_up if layer.kind == "swiglu" else layer.up
    rows = [x @ row + (0 if first.bias is None else first.bias[i]) for i, row in enumerate(first.weight)]
    if layer.kind == "swiglu":
        gates, ups = [gate_factor * g for g in rows[:7]], [up_factor * u for u in rows[7:]]
        hidden = [g / (1 + (-g).exp()) * u for g, u in zip(gates, ups, strict=True)]
    else:
        ups = [up_factor * u for u in rows]
        hidden = [u * 0.5 * (1 + torch.erf(u / math.sqrt(2))) for u in ups]
    down = sum(torch.outer(h, layer.down.weight[:, i]) for i, h in enumerate(hidden))
    return down + (0 if layer.down.bias is None else layer.down.bias)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((7,), factor, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 7
        return self.factor * x


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_match_the_formula(kind: str, bias: bool):
    layer, x = mlp(kind, bias), inputs().requires_grad_()
    ours, theirs = layer(x), written_out(layer, x)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    leaves = [x, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_slots_scale_before_the_nonlinearity():
    layer, x = mlp("swiglu"), inputs()
    layer.accept("gate-scale", Times(2.0))
    layer.accept("up-scale", Times(-3.0))
    torch.testing.assert_close(layer(x), written_out(layer, x, 2.0, -3.0), **TOLERANCE)
    layer = mlp("gelu")
    layer.accept("up-scale", Times(2.0))
    torch.testing.assert_close(layer(x), written_out(layer, x, up_factor=2.0), **TOLERANCE)


def test_slots_refuse():
    assert mlp("swiglu").offers == {"gate-scale", "up-scale"}
    assert mlp("gelu").offers == {"up-scale"}
    with pytest.raises(NormLabError, match="unknown slot of MLP 'gate-scale'"):
        mlp("gelu").accept("gate-scale", nn.Identity())
    layer = mlp("swiglu")
    layer.accept("up-scale", nn.Identity())
    with pytest.raises(NormLabError, match="already filled"):
        layer.accept("up-scale", nn.Identity())
    with pytest.raises(NormLabError, match="expected an nn"):
        layer.accept("gate-scale", 2.0)


def test_roles():
    gated = [(role.role, *role.view().shape) for role in find_roles(mlp("swiglu", bias=True))]
    assert gated == [("gate", 7, 5), ("up", 7, 5), ("bias", 14), ("down", 5, 7), ("bias", 5)]
    assert [role.role for role in find_roles(mlp("gelu"))] == ["up", "down"]
    layer = mlp("swiglu")
    gate = find_roles(layer)[0].view()
    torch.testing.assert_close(inputs() @ gate.T, layer.gate_up(inputs())[:, :7], **TOLERANCE)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_dtypes_meta_and_autocast(kind: str):
    x = inputs().float()
    assert mlp(kind).bfloat16()(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(kind).float()(x).dtype == torch.bfloat16
    with torch.device("meta"):
        assert MLP(5, 7, kind)(torch.empty(2, 3, 5)).shape == (2, 3, 5)


@pytest.mark.full
def test_compiles_as_one_graph():
    layer, x = mlp("swiglu"), inputs()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), **TOLERANCE)


def test_refuses_unknown_kinds_and_bad_sizes():
    with pytest.raises(NormLabError, match="did you mean 'swiglu'"):
        MLP(5, 7, "swigelu")
    with pytest.raises(NormLabError, match="hidden is 0"):
        MLP(5, 0)
