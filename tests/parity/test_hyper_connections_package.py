"""hyper-connections (lucidrains) against `hc` at random coefficients; a negative control against x-transformers.

Our stack runs with tensors made of their parameters, so that the gradients of both are those of their parameters.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import normlab
from normlab.norms import rms, rms_norm
from normlab.schemes.contract.streams import mix_streams

from .compare import WRONG, check, differences, quiet_imports, states, tolerance

with quiet_imports():
    HyperConnections = pytest.importorskip("hyper_connections").HyperConnections
    XHyperConnection = pytest.importorskip("x_transformers.x_transformers").HyperConnection

D, DEPTH = 10, 3


class Branch(nn.Module):
    """Mixes tokens and channels; nobody's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12, bias=False), nn.Linear(12, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x + x.mean(-2, keepdim=True))))


@torch.no_grad()
def their_network(streams: int, tanh: bool, blocks: list[list[Branch]]) -> nn.ModuleList:
    """Their connections around our branches, with coefficients far from their start."""
    generator = torch.Generator().manual_seed(4)
    network = nn.ModuleList(
        HyperConnections(streams, dim=D, layer_index=k, tanh=tanh) for k in range(2 * len(blocks))
    ).double()
    for parameter in network.parameters():
        parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    network.extend([branch for block in blocks for branch in block])
    return network.double()


def run_theirs(network: nn.ModuleList, streams: int, x: torch.Tensor) -> torch.Tensor:
    connections, branches = network[: len(network) // 2], network[len(network) // 2 :]
    # Streams are folded into the batch, the stream's index fastest.
    state = x.repeat_interleave(streams, dim=0)
    for connection, branch in zip(connections, branches, strict=True):
        seen, add = connection(state)
        state = add(branch(rms_norm(seen, 0.0)))
    return rms_norm(state.unflatten(0, (-1, streams)).sum(1), 0.0)


def read_of(connection) -> dict[str, torch.Tensor]:
    """The parameters of an `HCRead` made of theirs."""
    alpha, scales = connection.static_alpha, (connection.dynamic_alpha_scale, connection.dynamic_beta_scale)
    return {
        "read": alpha[:, 0],
        "mix": alpha[:, 1:],
        "write": connection.static_beta,
        "dynamic.norm.weight": 1 + connection.norm.gamma,
        "dynamic.project.weight": torch.cat([connection.dynamic_alpha_fn.T, connection.dynamic_beta_fn[None]]),
        "dynamic.scale": torch.stack(scales),
        "norm.weight": torch.ones(D, dtype=torch.float64),
    }


def run_ours(stack: normlab.Stack, network: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    values = {
        f"layers.{k // 2}.block.steps.{k % 2}.read.{name}": value
        for k in range(len(network) // 2)
        for name, value in read_of(network[k]).items()
    }
    return functional_call(stack, values, x)


def compare(streams: int = 4, tanh: bool = True) -> dict[str, float]:
    torch.manual_seed(0)
    blocks = [[Branch(), Branch()] for _ in range(DEPTH)]
    theirs = their_network(streams, tanh, blocks)
    # Their epsilon is 1e-12 on the length of a stream: none at all here.
    scheme = normlab.scheme("hc", streams=streams, tanh=tanh, eps=0.0)
    stack = normlab.Stack(scheme, blocks, D, residual_only=True).double()
    leaves = {name: (p, p) for name, p in theirs.named_parameters()}
    return differences(
        lambda x: run_theirs(theirs, streams, x), lambda x: run_ours(stack, theirs, x), states(D), leaves
    )


@pytest.mark.parametrize(("streams", "tanh"), [(4, True), (3, False), (1, True)])
def test_value_and_gradients_match(streams: int, tanh: bool):
    # The gradient of a scale is one number, a sum of B·T·n·(n + 1) = 240 terms of both signs: √240 times as many eps.
    check(compare(streams, tanh), 240**0.5 * tolerance())


def test_the_other_side_of_the_matrix_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.schemes.hc.mix_streams", lambda mix, x: mix_streams(mix.mT, x))
    found = compare()
    assert found["output"] > WRONG
    assert found["gradient of input"] > WRONG


@pytest.mark.parametrize("layer", range(6))
def test_both_start_with_the_same_coefficients(layer: int):
    theirs = HyperConnections(4, dim=D, layer_index=layer)
    step = normlab.scheme("hc").bind(depth=3, dim=D).block(layer // 2).steps[layer % 2]
    own = dict(step.read.named_parameters())
    for name, value in read_of(theirs).items():
        assert torch.equal(own[name].double(), value.double()), name


def test_x_transformers_mixes_with_a_matrix_of_ones():
    """A negative control: whatever its parameters, every stream is replaced by the sum of all (version 2.31.10)."""
    torch.manual_seed(0)
    theirs = XHyperConnection(D, layer_index=1, num_residual_streams=4)
    for parameter in theirs.parameters():
        parameter.data += torch.randn(parameter.shape)
    state = torch.randn(2, 3, 4, D)
    with torch.no_grad():
        _, mixed, _ = theirs.prepare(state.transpose(1, 2).reshape(8, 3, D))
    torch.testing.assert_close(mixed, state.sum(-2, keepdim=True).expand_as(state), rtol=1e-5, atol=1e-5)
    assert float(rms(mixed).amax() / rms(state).amax()) > 1.2


def test_no_coefficients_of_ours_do_what_x_transformers_does():
    """Its start, one-hot and identity logits, is not ours: the mixing expands, ours leaves the streams alone."""
    theirs = XHyperConnection(D, layer_index=0, num_residual_streams=4)
    x = torch.randn(1, 3, D)
    _, mixed, _ = theirs.prepare(x.repeat_interleave(4, dim=0))
    torch.testing.assert_close(mixed, 4 * x.unsqueeze(-2).expand_as(mixed), rtol=1e-5, atol=1e-5)
    for name in ("hc", "mhc"):
        step = normlab.scheme(name).bind(depth=1, dim=D).block(0).steps[0]
        state = x.unsqueeze(-2).repeat(1, 1, 4, 1)
        torch.testing.assert_close(step(state, torch.zeros_like), state, rtol=1e-5, atol=1e-5)
