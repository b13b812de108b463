"""Feed-forward sublayers: SwiGLU and GELU, with slots for scales that a scheme puts before the nonlinearity.

Formula    swiglu: F(x) = W_down (silu(S_g gate) ⊙ S_u up),  [gate; up] = W_gate_up x
           gelu:   F(x) = W_down gelu(S_u W_up x)             (exact, not the tanh approximation)
Slots      gate-scale S_g (swiglu alone), up-scale S_u
Source     arXiv 2002.05202 (swiglu), arXiv 1606.08415 (gelu)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from normlab.errors import unknown
from normlab.kernels import backends
from normlab.kernels.swiglu import gated_linear
from normlab.models.sublayer import (
    Sublayer,
    check_positive,
    is_plain,
    product_dtype,
    project,
    runs_as_written,
    scale_rows,
    through,
)
from normlab.roles import Part, Spec
from normlab.schemes.contract.blocks import has_hooks
from normlab.schemes.contract.scales import channel_factor

_OFFERS = {"swiglu": frozenset({"gate-scale", "up-scale"}), "gelu": frozenset({"up-scale"})}


class FeedForward(Sublayer):
    """Base class of `MLP` and `MoE`: the nonlinearity and its slots."""

    branch_kind = "mlp"

    def __init__(self, dim: int, hidden: int, kind: str) -> None:
        super().__init__()
        if kind not in _OFFERS:
            raise unknown("kind of MLP", kind, _OFFERS)
        check_positive("mlp", dim=dim, hidden=hidden)
        self.dim, self.hidden, self.kind = dim, hidden, kind
        self.offers = _OFFERS[kind]
        self.gate_scale: nn.Module | None = None
        self.up_scale: nn.Module | None = None

    @property
    def gated(self) -> bool:
        """Whether this is a SwiGLU."""
        return self.kind == "swiglu"

    def activate(self, raw: torch.Tensor) -> torch.Tensor:
        """Apply the nonlinearity: (..., 2·hidden) with the gate first, or (..., hidden) for gelu, to (..., hidden)."""
        if not self.gated:
            return F.gelu(through(self.up_scale, raw))
        gate, up = raw.chunk(2, dim=-1)
        return F.silu(through(self.gate_scale, gate)) * through(self.up_scale, up)

    def _gate_up_parts(self) -> list[Part]:
        return [Part("gate", 0, self.hidden), Part("up", self.hidden, self.hidden)]


class MLP(FeedForward):
    """A feed-forward sublayer. Gate and up are one fused matrix, with the gate first."""

    def __init__(self, dim: int, hidden: int, kind: str = "swiglu", bias: bool = False) -> None:
        super().__init__(dim, hidden, kind)
        if self.gated:
            self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)
        else:
            self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    @property
    def casts_input(self) -> bool:
        # As in attention: neither a subclass nor a wrapper in the first matrix's place.
        return runs_as_written(self, MLP) and runs_as_written(self.gate_up if self.gated else self.up, nn.Linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fuses():
            return project(self.activate(project(x, self.gate_up if self.gated else self.up)), self.down)
        raw = self._scaled(x)
        dtype, bias = product_dtype(raw, self.down.weight), self.down.bias
        weight = self.down.weight.to(dtype)
        return gated_linear(raw, weight, None if bias is None else bias.to(dtype), kernels=self.kernels)

    def _fuses(self) -> bool:
        """Whether nonlinearity and output projection can be fused: a SwiGLU without hooks between the two."""
        return self.kernels != "reference" and self.gated and self._folds() and is_plain(self.down)

    def _folds(self) -> bool:
        """Whether the modules in the slots, if any, can be folded into the first matrix."""
        filled = [slot for slot in (self.gate_scale, self.up_scale) if slot is not None]
        if not filled:
            return True
        folds = not any(has_hooks(slot) or channel_factor(slot) is None for slot in filled)
        return (
            folds and is_plain(self.gate_up) and backends.choose(self.kernels, self.gate_up.weight[:1, :1]) == "triton"
        )

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """[S_g gate, S_u up]."""
        slots = (self.gate_scale, self.up_scale)
        if slots == (None, None):
            return project(x, self.gate_up)
        ones = torch.ones(self.hidden, device=x.device)
        # An empty slot multiplies by 1; a single number is expanded to all channels.
        factors = [ones if slot is None else channel_factor(slot) * ones for slot in slots]  # type: ignore[operator]
        factor, dtype = torch.cat(factors), product_dtype(x, self.gate_up.weight)
        bias = self.gate_up.bias
        weight = scale_rows(self.gate_up.weight, factor).to(dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else scale_rows(bias, factor).to(dtype))

    def parameter_roles(self) -> dict[str, Spec]:
        """Roles of the parameters (`normlab.roles`)."""
        first: dict[str, Spec] = {"gate_up.weight": self._gate_up_parts()} if self.gated else {"up.weight": "up"}
        return {**first, "down.weight": "down"}
