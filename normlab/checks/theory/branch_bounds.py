"""Upper bounds of branch outputs: the largest RMS that attention or an MLP can return, from its weights alone.

With spectral norms ‖·‖, an input whose tokens have length n = √d · RMS, and biases b:

    attention   ‖W_o‖ · (Σ_h (‖W_v^h‖ n + ‖b_v^h‖)²)^½ + ‖b_o‖
                The sum runs over heads because they may look at different tokens: ‖W_v‖ in its place is too small.
    plain MLP   ‖W_down‖ · (‖W_up‖ n + ‖b_up‖) + ‖b_down‖, for nonlinearities with |φ(a)| ≤ |a|
    gated MLP   ‖W_down‖ · min(g∞ u₂, g₂ u∞) + ‖b_down‖, with g₂ and u₂ the lengths of gate and up, bounded as above,
                and g∞, u∞ their largest entries, bounded by the longest row
    experts     the largest bound of an expert, since their weights sum to at most one; plus that of the shared one

Λ is this for a normalised input. A module may state its own bound: `rms_bound(rms_in) -> float`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormLabError
from normlab.models.attention import Attention
from normlab.models.mlp import MLP
from normlab.models.moe import MoE
from normlab.probes.sharded import whole
from normlab.roles import Role, find_roles
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of, unbounded


def branch_bound(module: nn.Module) -> BranchBound:
    """A function from a module's input RMS to its largest output RMS, at its current weights; infinite if unknown."""
    if callable(getattr(module, "rms_bound", None)):
        return partial(rms_bound_of, module)
    found = next((make for kind, make in _KNOWN.items() if isinstance(module, kind)), None)
    return found(module) if found else unbounded


def spectral_norm(matrix: Tensor) -> Tensor:
    """‖W‖ of every matrix in the last two dimensions, in fp64: the root of the Gram matrix's largest eigenvalue.

    NaN for a matrix that is not finite.
    """
    wide = matrix.detach().double()
    fit = wide.isfinite().all(-1).all(-1)
    wide = torch.where(fit[..., None, None], wide, 0.0)
    gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
    return torch.where(fit, torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt(), torch.nan)


@dataclass(frozen=True)
class _Matrix:
    """Norms of y = W x + b for inputs of length n: ‖y‖ ≤ two · n + shift, and |y_i| ≤ row · n + peak for every i."""

    two: float
    row: float
    shift: float = 0.0
    peak: float = 0.0

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> _Matrix:
        wide = whole(weight.detach()).double()
        rows = torch.linalg.vector_norm(wide, dim=-1).max()
        none = wide.new_zeros(1)
        b = none if bias is None else whole(bias.detach()).double()
        return cls(*torch.stack([spectral_norm(wide), rows, torch.linalg.vector_norm(b), b.abs().max()]).tolist())

    def length(self, n: float) -> float:
        return self.two * n + self.shift

    def largest(self, n: float) -> float:
        return min(self.row * n + self.peak, self.length(n))


@dataclass(frozen=True)
class AttentionBound:
    """Bound of softmax attention for any attention weights."""

    dim: int
    head_dim: int
    group: int
    """Query heads that share a value head."""
    values: Sequence[tuple[float, float]]
    """(‖W_v^h‖, ‖b_v^h‖) of each value head."""
    out: _Matrix
    norm: nn.Module = field(default_factory=nn.Identity)
    """Norm of the values."""

    def __call__(self, rms_in: float) -> float:
        n, width = math.sqrt(self.dim) * rms_in, math.sqrt(self.head_dim)
        heads = [width * rms_bound_of(self.norm, (norm * n + bias) / width) for norm, bias in self.values]
        return self.out.length(math.sqrt(self.group) * math.hypot(*heads)) / math.sqrt(self.dim)


@dataclass(frozen=True)
class FeedForwardBound:
    """Bound of a feed-forward network with a nonlinearity |φ(a)| ≤ |a|."""

    dim: int
    hidden: int
    up: _Matrix
    down: _Matrix
    gate: _Matrix | None = None
    up_scale: nn.Module | None = None
    gate_scale: nn.Module | None = None

    def __call__(self, rms_in: float) -> float:
        n = math.sqrt(self.dim) * rms_in
        up, up_peak = self._through(self.up_scale, self.up, n)
        if self.gate is None:
            return self.down.length(up) / math.sqrt(self.dim)
        gate, gate_peak = self._through(self.gate_scale, self.gate, n)
        return self.down.length(min(gate_peak * up, gate * up_peak)) / math.sqrt(self.dim)

    def _through(self, scale: nn.Module | None, matrix: _Matrix, n: float) -> tuple[float, float]:
        """(length, largest entry) behind a scale; of what that does to single entries nothing is known."""
        if scale is None:
            return matrix.length(n), matrix.largest(n)
        width = math.sqrt(self.hidden)
        length = width * rms_bound_of(scale, matrix.length(n) / width)
        return length, length


def _attention(module: Attention) -> AttentionBound:
    rows = module.kv_heads * module.head_dim
    weight = whole(module.qkv.weight.detach())[-rows:].unflatten(0, (module.kv_heads, module.head_dim))
    norms = spectral_norm(weight)
    shifts = torch.zeros_like(norms)
    if module.qkv.bias is not None:
        biases = whole(module.qkv.bias.detach())[-rows:].double().view(module.kv_heads, module.head_dim)
        shifts = torch.linalg.vector_norm(biases, dim=-1)
    return AttentionBound(
        dim=module.dim,
        head_dim=module.head_dim,
        group=module.heads // module.kv_heads,
        values=list(zip(norms.tolist(), shifts.tolist(), strict=True)),
        out=_Matrix.of(module.out.weight, module.out.bias),
        norm=module.v_norm or nn.Identity(),
    )


def _mlp(module: MLP) -> FeedForwardBound:
    first = module.gate_up if module.gated else module.up
    return _feed_forward(module, first.weight, first.bias, _Matrix.of(module.down.weight, module.down.bias))


def _feed_forward(module: MLP | MoE, first: Tensor, bias: Tensor | None, down: _Matrix) -> FeedForwardBound:
    """With `first` the up matrix, the gate fused before it where there is one."""
    parts = whole(first.detach()).split(module.hidden)
    biases = [None] * len(parts) if bias is None else whole(bias.detach()).split(module.hidden)
    *gate, up = (_Matrix.of(part, shift) for part, shift in zip(parts, biases, strict=True))
    return FeedForwardBound(
        dim=module.dim,
        hidden=module.hidden,
        up=up,
        down=down,
        gate=gate[0] if gate else None,
        up_scale=module.up_scale,
        gate_scale=module.gate_scale,
    )


def _experts(module: MoE) -> BranchBound:
    stacked = module.gate_up if module.gated else module.up
    pairs = zip(whole(stacked.detach()), whole(module.down.detach()), strict=True)
    experts = [_feed_forward(module, first, None, _Matrix.of(down)) for first, down in pairs]
    shared: BranchBound = _mlp(module.shared) if module.shared is not None else lambda rms_in: 0.0
    return lambda rms_in: max(expert(rms_in) for expert in experts) + shared(rms_in)


_KNOWN: dict[type[nn.Module], Callable[[Any], BranchBound]] = {Attention: _attention, MLP: _mlp, MoE: _experts}


def slopes_by_role(block: nn.Module) -> dict[str, float]:
    """Λ of the branches of a foreign block for tokens of RMS 1, by the path of each branch's last matrix.

    The matrices are found by their roles, in the order in which the block lists them: values and output make an
    attention, up (with a gate or without) and down an MLP. Biases do not count. Raises where a matrix has no role.
    """
    slopes: dict[str, float] = {}
    waiting: dict[str, Role] = {}
    for role in find_roles(block):
        if role.role == "o" and "v" in waiting:
            slopes[_owner(role)] = _attention_slope(block, waiting.pop("v"), role)
        elif role.role == "down" and "up" in waiting:
            slopes[_owner(role)] = _feed_forward_slope(waiting.pop("up"), role, waiting.pop("gate", None))
        elif role.role in ("v", "up", "gate"):
            waiting[role.role] = role
    if not slopes:
        raise NormLabError(f"{type(block).__name__}: no branch with matrices v and o, or up and down, was found")
    return slopes


def _attention_slope(block: nn.Module, value: Role, out: Role) -> float:
    v, o = _oriented(value), _oriented(out)
    # Where the width of a head is not known, ‖W_v‖_F² is at least Σ_h ‖W_v^h‖², however the heads are cut.
    head_dim = _stated_int(block, value.name, "head_dim")
    cut = head_dim is not None and v.ndim == 2 and v.shape[-2] % head_dim == 0
    heads = spectral_norm(v.unflatten(-2, (-1, head_dim))) if cut and head_dim else v.detach().double()
    sharing = max(o.shape[-1] / v.shape[-2], 1.0)
    return float(spectral_norm(o).max() * torch.linalg.vector_norm(heads) * math.sqrt(sharing))


def _feed_forward_slope(up: Role, down: Role, gate: Role | None) -> float:
    plain = float(spectral_norm(_oriented(down)).max() * spectral_norm(_oriented(up)).max())
    if gate is None:
        return plain
    rows = torch.linalg.vector_norm(_oriented(gate).detach().double(), dim=-1).max()
    return plain * float(rows) * math.sqrt(_oriented(up).shape[-1])


def _oriented(role: Role) -> Tensor:
    """(..., out, in)."""
    gathered = nn.Parameter(whole(role.parameter.detach()), requires_grad=False)
    matrix = dataclasses.replace(role, parameter=gathered).view()
    return matrix if role.input_axis == -1 else matrix.mT


def _owner(role: Role) -> str:
    return role.name.rpartition(".")[0] or role.name


def _stated_int(block: nn.Module, path: str, name: str) -> int | None:
    """A whole number that a module on the way to a parameter, the nearest one first, states of itself."""
    while path:
        path = path.rpartition(".")[0]
        value = getattr(block.get_submodule(path), name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
