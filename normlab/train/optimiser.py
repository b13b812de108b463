"""Optimisers: AdamW for all parameters, or Muon for hidden matrices and AdamW for the rest; parameter groups.

In both cases one `torch.optim.Optimizer` holds every parameter in exactly one group. A group has the weight decay and
the learning-rate factor of the scheme, AdamW's ε, and its peak rate as `initial_lr`; `set_lr` applies the schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from normlab.errors import NormLabError, unknown
from normlab.models.transformer import Transformer
from normlab.probes.sharded import whole
from normlab.roles import Role
from normlab.train.distributed import shared_like
from normlab.train.transfer import HIDDEN, Rule, Transfer

Kind = Literal["adamw", "muon"]

Parts = Mapping[int, Sequence[Role]]
"""The roles in each parameter, by the parameter's id: q, k and v of a fused matrix."""

MOMENTUM = 0.95
UPDATE_RMS = 0.2
"""RMS of Muon's update before the learning rate: about that of AdamW's, so that one rate suits both."""

# Newton–Schulz coefficients as published with Muon (Jordan 2024): few rounds, singular values end near 1, not at it.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
# Weights that are orthogonalised at a time: enough to keep a GPU busy, little memory beside the model.
_AT_A_TIME = 2**26


def build(
    model: Transformer,
    *,
    kind: Kind = "adamw",
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    transfer: Transfer | None = None,
) -> Optimizer:
    """The optimiser of a model; `transfer` sets the rate and ε of every parameter for its width and depth."""
    _check(kind, lr, weight_decay, betas, eps)
    groups = parameter_groups(model, kind=kind, lr=lr, weight_decay=weight_decay, eps=eps, transfer=transfer)
    fused = all(p.device.type in ("cuda", "cpu") for p in model.parameters())
    if kind == "adamw":
        return AdamW(groups, betas=betas, eps=eps, fused=fused)
    return Muon(groups, _parts(model.find_roles()), betas=betas, eps=eps, fused=fused)


def set_lr(optimiser: Optimizer, multiplier: float) -> None:
    """Set every group's learning rate to its peak rate times the schedule's multiplier."""
    for group in optimiser.param_groups:
        rate = group["initial_lr"] * multiplier
        if isinstance(group["lr"], torch.Tensor):
            # A CUDA graph reads it where it is.
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def set_capturable(optimiser: Optimizer, capturable: bool) -> None:
    """Make AdamW's steps recordable in a CUDA graph, with learning rates that are tensors on the device; or undo it."""
    for group in optimiser.param_groups:
        device = group["params"][0].device
        # The kernel of a GPU reads single precision; that of a CPU any.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = float(group["lr"])
        group["lr"] = torch.tensor(rate, dtype=dtype, device=device) if capturable else rate
        group["capturable"] = capturable


class Muon(Optimizer):
    """Muon (Jordan 2024) for the groups whose rule is "muon", AdamW for the others, with one state for all.

    Formula    B ← μB + (1 − μ)G;  W ← W − lr · 0.2 √max(rows, columns) · O((1 − μ)G + μB)
               O(X) = the orthogonal matrix nearest to X, by five rounds of the quintic Newton–Schulz iteration

    The factor 0.2 √max makes updates as large as AdamW's, so that its rate and decay can be kept (arXiv 2502.16982).
    Every matrix is orthogonalised alone: q, k and v of a fused one, and each expert of a stack.
    """

    def __init__(self, groups: list[dict[str, Any]], parts: Parts, *, momentum: float = MOMENTUM, **for_adamw: Any):
        self._adamw = AdamW(groups, **for_adamw)
        super().__init__(groups, self._adamw.defaults)
        self._parts, self._momentum = parts, momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Shared anew in every step: loading a state dict replaces both.
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if group["rule"] == "adamw"]
        self._adamw.step()
        for group in self.param_groups:
            if group["rule"] == "muon":
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        # A matrix that is sharded over ranks is gathered: its directions are those of the whole.
        parameters = [p for p in group["params"] if p.grad is not None]
        updates = [whole(self._momentum_of(p)) for p in parameters]
        pieces = [
            dataclasses.replace(role, parameter=update).view()
            for p, update in zip(parameters, updates, strict=True)
            for role in self._parts[id(p)]
        ]
        _orthogonalise_(pieces)
        for p, update in zip(parameters, updates, strict=True):
            p.mul_(1.0 - group["lr"] * group["weight_decay"])
            p.add_(shared_like(update, p), alpha=-group["lr"])

    def _momentum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Nesterov momentum, as a new tensor."""
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(grad, 1.0 - self._momentum)
        return grad.lerp(state["momentum"], self._momentum)


def _orthogonalise_(pieces: Sequence[torch.Tensor]) -> None:
    """Replace every matrix by its orthogonalised update; matrices of one shape are batched."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for piece in pieces:
        by_shape.setdefault(piece.shape[-2:], []).extend(piece.flatten(0, -3) if piece.ndim > 2 else [piece])
    for shape, matrices in by_shape.items():
        size = UPDATE_RMS * math.sqrt(max(shape))
        at_a_time = max(1, _AT_A_TIME // shape.numel())
        for start in range(0, len(matrices), at_a_time):
            batch = matrices[start : start + at_a_time]
            for matrix, update in zip(batch, orthogonalise(torch.stack(batch)), strict=True):
                matrix.copy_(size * update)


def orthogonalise(matrices: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """UVᵀ of matrices (..., A, B) = UΣVᵀ, but for singular values that end between 0.7 and 1.2; zero stays zero."""
    a, b, c = _QUINTIC
    # GPUs are an order faster in bf16, and the iteration does not mind; CPUs gain nothing from it.
    x = matrices.bfloat16() if matrices.is_cuda else matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # The Frobenius norm bounds the largest singular value, and the iteration converges from (0, 1].
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _parts(roles: Sequence[Role]) -> Parts:
    parts: dict[int, list[Role]] = {}
    for role in roles:
        parts.setdefault(id(role.parameter), []).append(role)
    return parts


def parameter_groups(
    model: Transformer,
    *,
    kind: Kind = "adamw",
    lr: float,
    weight_decay: float = 0.0,
    eps: float | None = None,
    transfer: Transfer | None = None,
) -> list[dict[str, Any]]:
    """The scheme's parameter groups, split by update rule and by the factors that `transfer` asks for.

    Without `eps` the groups have none: AdamW then uses one ε for all.
    """
    parts = _parts(model.find_roles())
    rules: tuple[Rule, ...] = get_args(Rule)
    rates = {rule: transfer.rates(model, rule) for rule in rules} if transfer else {}
    epsilons = transfer.epsilons(model) if transfer and eps is not None else {}

    def asked(p: nn.Parameter) -> _Asked:
        name, roles = parts[id(p)][0].name, [part.role for part in parts[id(p)]]
        rule: Rule = "muon" if kind == "muon" and all(role in HIDDEN for role in roles) else "adamw"
        # Muon has no ε.
        return _Asked(rule, rates[rule][name] if rates else 1.0, epsilons.get(name, 1.0) if rule == "adamw" else 1.0)

    groups = model.param_groups(lr=lr, weight_decay=weight_decay)
    return [part for group in groups for part in _split(group, eps, asked)]


class _Asked(NamedTuple):
    """What a parameter asks of its group: update rule, factors on learning rate and ε."""

    rule: Rule
    rate: float
    eps: float


def _split(
    group: dict[str, Any], eps: float | None, asked: Callable[[nn.Parameter], _Asked]
) -> Iterator[dict[str, Any]]:
    """Split a group of the scheme into groups that ask for the same."""
    cut: dict[_Asked, list[nn.Parameter]] = {}
    for p in group["params"]:
        cut.setdefault(asked(p), []).append(p)
    for (rule, rate, smaller), params in cut.items():
        lr = group["lr"] * rate
        # Decay is applied times the rate: what decays in a step must not shrink with the width.
        decay = group["weight_decay"] / rate
        own = {"lr": lr, "initial_lr": lr, "params": params, "rule": rule, "weight_decay": decay}
        yield {**group, **own, **({} if eps is None else {"eps": eps * smaller})}


def _check(kind: str, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> None:
    if kind not in get_args(Kind):
        raise unknown("optimiser", str(kind), get_args(Kind))
    if not 0.0 < lr < math.inf:
        raise NormLabError(f"optimiser: lr must be a positive number, got {lr}; try 1e-3")
    if not 0.0 <= weight_decay < math.inf:
        raise NormLabError(f"optimiser: weight_decay must be a number from 0 on, got {weight_decay}; try 0.1")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise NormLabError(f"optimiser: betas must be two numbers in [0, 1), got {betas}; try (0.9, 0.95)")
    if not 0.0 < eps < math.inf:
        raise NormLabError(f"optimiser: eps must be a positive number, got {eps}; try 1e-8")
