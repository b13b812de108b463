"""Kernels of other libraries (Liger, quack) for comparison, if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

Pair = tuple[Tensor, Tensor]

# pyright: reportMissingImports=false


def calls(step: str, x: Tensor, g: Tensor, gain: Tensor) -> dict[str, Callable[[], Pair]]:
    """Calls of other libraries by name, which return the same (state, input) as NormLab's step."""
    known = {
        "add + norm (pre)": {"liger": lambda: _liger_add(x, g, gain), "quack": lambda: _quack_add(x, g, gain)},
        "RMSNorm": {"liger": lambda: _liger_norm(x, gain), "quack": lambda: _quack_norm(x, gain)},
    }
    homes = {"liger": "liger_kernel", "quack": "quack"}
    return {name: call for name, call in known.get(step, {}).items() if find_spec(homes[name]) is not None}


def _liger_add(x: Tensor, g: Tensor, gain: Tensor) -> Pair:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    seen, state = LigerFusedAddRMSNormFunction.apply(g, x, gain, 1e-6, 0.0, "llama", False)
    return state, seen


def _liger_norm(x: Tensor, gain: Tensor) -> Pair:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return x.view_as(x), LigerRMSNormFunction.apply(x, gain, 1e-6, 0.0, "llama", False)


def _quack_add(x: Tensor, g: Tensor, gain: Tensor) -> Pair:
    from quack import rmsnorm

    seen, state = rmsnorm(g, gain, residual=x, eps=1e-6, prenorm=True)
    return state, seen


def _quack_norm(x: Tensor, gain: Tensor) -> Pair:
    from quack import rmsnorm

    return x.view_as(x), rmsnorm(x, gain, eps=1e-6)
