"""A look at compiled models shows them as they were written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab import Decoder, DecoderConfig
from normlab.probes.probe import measure, probe
from tests.matrix import parametrize
from tests.probes.loops import SIZE, same, text


class Stepping(Decoder):
    """A decoder whose call is its loss."""

    def forward(self, *batch):  # type: ignore[override]
        return self.loss(*batch)


# Torch's compiler asks every tensor for its gradient and hides the warning this gives, but not from an error filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@parametrize("how", ["wrapped", "in place", "blocks in place", "blocks wrapped"], quick=["blocks wrapped"])
@parametrize("warm", [False, True], quick=[True])
def test_compiled_models_are_measured_as_they_were_written(how, warm, no_default_device):
    torch.manual_seed(0)
    plain = Stepping(DecoderConfig(init_std=0.1, **SIZE))
    batch = text()
    expected = measure(plain, batch)
    torch.compiler.reset()
    called: nn.Module = plain
    if how == "wrapped":
        called = torch.compile(plain, backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        plain.compile(backend="eager")
    for k, layer in enumerate(list(plain.stack.layers)):
        if how == "blocks in place":
            layer.compile(backend="eager")
        elif how == "blocks wrapped":
            plain.stack.layers[k] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    if how == "blocks wrapped":
        # Our stack passes the blocks by where nobody listens to them; a wrapper has no such way.
        plain.stack.checkpointing = True
    if warm:
        called(*batch).backward()
    same(measure(called, batch), expected, 1e-5)
    if how == "wrapped":
        with probe(plain) as look:
            called(*batch).backward()
        same(look.profile, expected, 1e-5, but=("grad_w",) if warm else ())
    assert called(*batch).item() == pytest.approx(expected.loss, rel=1e-5)
    torch.compiler.reset()
