"""`GateProjection`: the linear map that computes the gates of a residual step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from normlab.norms import widen
from normlab.roles import Spec


class GateProjection(nn.Module):
    """W·x without bias, computed as the matrices of sublayers are: in the weight's dtype, or in autocast's.

    `role` is "mix" for a matrix that reads the stream, "spread" for one whose outputs are channels of the stream. Zero
    before `init_`.
    """

    def __init__(self, inputs: int, outputs: int, role: Literal["mix", "spread"] = "mix"):
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def parameter_roles(self) -> Mapping[str, Spec]:
        return {"weight": self.role}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return widen(nn.functional.linear(x.to(self.weight.dtype), self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} to {self.weight.shape[0]}"
