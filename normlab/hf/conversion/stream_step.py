"""One residual step of a layer of several streams: its own module that reads them, and its own operations that write.

The write is kept as the layer computes it, call by call, so that a conversion to the scheme which the model has changes
no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normlab.hf.conversion.foreign_norm import ModelNorm
from normlab.hf.conversion.foreign_streams import ModelRead, StreamRead
from normlab.hf.conversion.trace import TracedCall, get_part
from normlab.norms import Norm
from normlab.schemes.contract.parts import Step, Write, split_read

_AGREE = 1e-4


@dataclass(frozen=True)
class WriteProgram:
    """The calls that make the next state of the streams, an update and coefficients."""

    states: tuple[str, ...]
    """Names of values that are equal to the state."""
    update: str
    carry: tuple[tuple[str, ...], ...]
    """Names of each coefficient."""
    calls: tuple[TracedCall, ...]
    output: str


@dataclass(frozen=True)
class StreamStep:
    """How a branch of a layer reads the streams and writes to them."""

    connection: str
    """Path of the module that reads."""
    read: StreamRead
    write: WriteProgram

    def step(self, layer: nn.Module, norm: ModelNorm | Norm | None, like: Write | None = None) -> Step:
        """The step made of the layer's own parts; `like` is the write of a scheme that computes the same."""
        reads = ModelRead(get_part(layer, self.connection), self.read.outputs, norm)
        return Step(ModelStreamWrite(self.write, like or Write()), read=reads)


def writes_alike(read: StreamRead, program: WriteProgram) -> bool:
    """Whether a layer writes to its streams as the scheme does that reads them in the same way."""
    streams = read.scheme.streams
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        step: Any = read.scheme.bind(depth=1, dim=streams + 3).block(0).steps[0]
        for parameter in step.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x, f = torch.randn(2, 2, 3, streams, streams + 3, generator=generator, dtype=torch.float32)
        _, carry = split_read(step.read(x))
        expected = step.write(x, f[:, :, 0], *carry)
        found = ModelStreamWrite(program, Write())(x.flatten(-2) if read.flat else x, f[:, :, 0], *carry)
    return torch.allclose(found.flatten(2), expected.flatten(2), rtol=_AGREE, atol=_AGREE)


class ModelStreamWrite(Write):
    """A model's own write to its streams, for use in a NormLab block."""

    def __init__(self, program: WriteProgram, like: Write):
        super().__init__()
        self.program, self.like = program, like

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        program = self.program
        values = dict.fromkeys(program.states, state) | {program.update: update}
        for names, value in zip(program.carry, carry, strict=True):
            values |= dict.fromkeys(names, value)
        for call in program.calls:
            values[call.name] = call.run(self, values)
        return values[program.output]

    def mixing(self, *carry: torch.Tensor) -> torch.Tensor | None:
        return self.like.mixing(*carry)

    def rms_bound(self, state: float, update: float) -> float:
        return self.like.rms_bound(state, update)
