"""A look at models whose blocks return all kinds of things, or run in all kinds of ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from normlab import NormLabError
from normlab.probes.probe import measure, probe
from tests.probes.loops import Block, Tower, decoder, loss_of, same, text


@dataclasses.dataclass
class Result:
    weights: torch.Tensor
    state: torch.Tensor


WRAPPERS = {
    "tuple": (lambda x: (x, None), lambda out: out[0]),
    "list after others": (lambda x: [torch.ones(2, 2), torch.zeros(1), x], lambda out: out[2]),
    "dict": (lambda x: {"weights": torch.ones(3, 3), "state": x}, lambda out: out["state"]),
    "dataclass": (lambda x: Result(torch.ones(3, 3), x), lambda out: out.state),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("by_name", [False, True])
def test_tuples_dicts_and_dataclasses(kind, by_name):
    wrap, unwrap = WRAPPERS[kind]

    class Wrapped(Block):
        def forward(self, x, mask=None):
            assert mask is None or not mask.requires_grad
            return wrap(super().forward(x))

    class Wrapping(Tower):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = unwrap(layer(mask=torch.zeros(5, 5), x=x) if by_name else layer(x))
            return {"loss": x.square().mean(), "logits": x}

    torch.manual_seed(1)
    plain = Tower()
    wrapped = Wrapping([Wrapped() for _ in range(3)])
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    expected, found = measure(plain, x), measure(wrapped, x)
    same(found, expected)
    assert found.logits_rms == pytest.approx(expected.rms[-1])


def test_a_block_without_a_state_is_one_clear_line():
    class Mute(Block):
        def forward(self, x):
            return None

    with pytest.raises(NormLabError, match="without a hidden state"):
        measure(Tower([Mute(), Mute()]), torch.randn(2, 5, 8))


def test_a_model_without_a_loss_is_one_clear_line():
    with pytest.raises(NormLabError, match="returned no loss"):
        measure(decoder(), text()[0])


def test_a_block_that_writes_over_its_input_is_not_compared_with_it():
    class Inplace(Block):
        def forward(self, x):
            return x.add_(self.mix.weight.sum())

    with torch.no_grad(), probe(tower := Tower([Inplace() for _ in range(3)])) as look:
        tower(torch.randn(2, 5, 8))
    assert look.profile.branch_rms == [None, None, None]
    assert [rms is None for rms in look.profile.rms] == [True, False, False, False]


def test_parts_of_blocks_can_be_named_as_blocks():
    # The attention of a scheme whose state is two streams returns one.
    profile = measure(decoder("dual"), text(), loss_of, blocks="stack.layers.*.branches.0")
    assert profile.depth == 3
    assert None not in profile.rms


def test_blocks_that_nobody_hears_are_refused():
    class Quiet(Tower):
        def forward(self, x):
            for layer in self.layers:
                x = layer.forward(x)
            return x.square().mean()

    with pytest.raises(NormLabError, match=r"layers\.0, layers\.1, layers\.2 did not run, or unheard"):
        measure(Quiet(), torch.randn(2, 5, 8))

    class Skips(Tower):
        def forward(self, x):
            return self.layers[2](self.layers[0](x)).square().mean()

    with pytest.raises(NormLabError, match=r"layers\.1 did not run"):
        measure(Skips(), torch.randn(2, 5, 8))
