"""Mixture of experts with top-k routing and no capacity limit: no token is dropped.

Formula    F(x) = Σ_{e ∈ top(x)} w_e(x) · MLP_e(x)  [+ MLP_shared(x)],  p = softmax(W_router x)
           w_e = p_e / Σ_top p if renormalise else p_e
Source     arXiv 1701.06538; balance loss arXiv 2101.03961, equation 4; z-loss arXiv 2202.08906
Law        a token's result does not depend on the other tokens in the batch, so a cache changes nothing
Fails      top_k = 1 with renormalise: every weight is 1 and the router learns from the balance loss alone
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normlab.errors import NormLabError
from normlab.models.mlp import MLP, FeedForward
from normlab.models.sublayer import check_positive, product_dtype
from normlab.norms import autocast_dtype
from normlab.roles import Spec

_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@dataclass(frozen=True)
class Routing:
    """Routing statistics and losses of the last forward pass over E experts."""

    balance_loss: torch.Tensor
    """E Σ_e f_e p_e: 1 if load and probability are uniform, E if one expert gets all tokens."""
    z_loss: torch.Tensor
    """Mean of logsumexp(router logits)², which keeps the logits small."""
    load: torch.Tensor
    """f_e (E,): the fraction of assignments that went to expert e; no gradient."""
    importance: torch.Tensor
    """p_e (E,): the mean router probability of expert e; no gradient."""


class MoE(FeedForward):
    """A mixture of `experts` MLPs, of which each token uses `top_k`, plus a shared one if `shared_hidden` is not 0.

    The weights are stacked: `gate_up` (E, 2·hidden, dim) or `up` (E, hidden, dim), and `down` (E, dim, hidden). All
    experts share the module in a slot; the shared expert gets its own copy.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        kind: str = "swiglu",
        shared_hidden: int = 0,
        renormalise: bool = True,
    ) -> None:
        super().__init__(dim, hidden, kind)
        check_positive("moe", experts=experts, top_k=top_k)
        if top_k > experts:
            raise NormLabError(f"moe: top_k is {top_k} of {experts} experts; expected at most {experts}; try {experts}")
        self.experts, self.top_k, self.renormalise = experts, top_k, renormalise
        self.router = nn.Linear(dim, experts, bias=False)
        if self.gated:
            self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        else:
            self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.shared = MLP(dim, shared_hidden, kind) if shared_hidden else None
        self.routing: Routing | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, self.dim)
        logits = self._router_logits(tokens)
        preferred, experts = logits.topk(self.top_k, dim=-1)
        by_expert, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(self.experts, device=x.device), right=True, out_int32=True)
        self.routing = _measure(logits, ends)
        results = self._run_experts(tokens[order // self.top_k], ends)[order.argsort()]
        weights = self._combine_weights(logits, preferred)
        update = (results.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(results.dtype)
        update = update.view_as(x)
        return update if self.shared is None else update + self.shared(x)

    def _router_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        # fp32 at least: a rounded logit can change the expert.
        dtype = torch.promote_types(torch.promote_types(tokens.dtype, self.router.weight.dtype), torch.float32)
        with _no_autocast(tokens):
            return F.linear(tokens.to(dtype), self.router.weight.to(dtype))

    def _combine_weights(self, logits: torch.Tensor, preferred: torch.Tensor) -> torch.Tensor:
        if self.renormalise:
            return preferred.softmax(-1)
        return (preferred - logits.logsumexp(-1, keepdim=True)).exp()

    def _run_experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Apply every expert to its rows; those of expert e end at ends[e]."""
        first = self.gate_up if self.gated else self.up
        dtype = product_dtype(rows, first)
        raw = expert_linear(rows.to(dtype), first.to(dtype), ends)
        return expert_linear(self.activate(raw).to(dtype), self.down.to(dtype), ends)

    def accept(self, need: str, module: nn.Module | float) -> None:
        super().accept(need, module)
        if self.shared is not None:
            self.shared.accept(need, copy.deepcopy(module))

    def _check_filling(self, need: str, module: nn.Module | float) -> None:
        super()._check_filling(need, module)
        same_width = self.shared is None or self.shared.hidden == self.hidden
        if not same_width and isinstance(module, nn.Module) and any(p.ndim for p in module.parameters()):
            raise NormLabError(
                f"moe: slot {need!r} has weights of one width, but experts have {self.hidden} channels and the shared "
                f"one {self.shared.hidden if self.shared else 0}; try shared_hidden={self.hidden}"
            )

    def parameter_roles(self) -> dict[str, Spec]:
        # Stacked experts are (E, out, in): the input axis is the last, as in nn.Linear.
        first: dict[str, Spec] = {"gate_up": self._gate_up_parts()} if self.gated else {"up": "up"}
        return {"router.weight": "router", **first, "down": "down"}

    def __getstate__(self) -> dict[str, Any]:
        # The last routing holds a reference to an autograd graph, which can be neither copied nor pickled.
        return {**self.__dict__, "routing": None}


def _measure(logits: torch.Tensor, ends: torch.Tensor) -> Routing:
    # At least 1: an empty batch has losses of 0, not 0/0.
    tokens = max(logits.shape[0], 1)
    importance = logits.softmax(-1).sum(0) / tokens
    counts = ends.diff(prepend=ends.new_zeros(1))
    load = counts.to(logits.dtype) / ends[-1].clamp(min=1)
    balance_loss = logits.shape[-1] * (load * importance).sum()
    z_loss = logits.logsumexp(-1).square().sum() / tokens
    return Routing(balance_loss, z_loss, load, importance.detach())


def _no_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# The two products below are each other's gradients, so they can be differentiated any number of times. They are custom
# operators because torch's grouped product knows only bf16 when compiling and on the meta device, refuses float64,
# unaligned and empty matrices, and fails on gradients that are not contiguous (those of .sum(), say).


@torch.library.custom_op("normlab::expert_linear", mutates_args=())
def expert_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x[rows of e] @ weight[e]ᵀ for each expert e: (R, in), (E, out, in) → (R, out).

    The rows of expert e end at ends[e] (int32), where those of e + 1 begin.
    """
    x, weight = x.contiguous(), _packed(weight)
    if _can_group(x, weight, x.shape[1], weight.shape[1]):
        return _grouped_mm(x, weight.mT, offs=ends)  # type: ignore[misc]
    result = x.new_empty(x.shape[0], weight.shape[1])
    for expert, rows in enumerate(_slices(ends)):
        result[rows] = x[rows] @ weight[expert].mT
    return result


@torch.library.custom_op("normlab::expert_outer", mutates_args=())
def expert_outer(y: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """y[rows of e]ᵀ @ x[rows of e] for each expert e: (R, out), (R, in) → (E, out, in)."""
    y, x = y.contiguous(), x.contiguous()
    if _can_group(y, x, y.shape[1], x.shape[1]):
        return _grouped_mm(y.mT, x, offs=ends)  # type: ignore[misc]
    result = x.new_empty(ends.shape[0], y.shape[1], x.shape[1])
    for expert, rows in enumerate(_slices(ends)):
        result[expert] = y[rows].mT @ x[rows]
    return result


def _can_group(a: torch.Tensor, b: torch.Tensor, *widths: int) -> bool:
    """Whether torch's grouped_mm supports these inputs: dtype, device, 16-byte alignment, not empty."""
    if _grouped_mm is None or a.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not a.shape[0]:
        return False
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) < (8, 0):
        return False
    aligned = all(width * a.element_size() % 16 == 0 for width in widths)
    return aligned and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


def _packed(weight: torch.Tensor) -> torch.Tensor:
    # grouped_mm accepts contiguous and transposed stacks; anything else is copied.
    return weight if weight.mT.is_contiguous() else weight.contiguous()


def _slices(ends: torch.Tensor) -> Iterator[slice]:
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


@expert_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@expert_outer.register_fake
def _(y: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    for_x = expert_linear(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    return for_x, expert_outer(grad, x, ends) if ctx.needs_input_grad[1] else None, None


def _outer_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    y, x, ends = ctx.saved_tensors
    for_y = expert_linear(x, grad, ends) if ctx.needs_input_grad[0] else None
    return for_y, expert_linear(y, grad.mT, ends) if ctx.needs_input_grad[1] else None, None


expert_linear.register_autograd(_linear_backward, setup_context=_save)
expert_outer.register_autograd(_outer_backward, setup_context=_save)
