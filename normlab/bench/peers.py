"""Kernels of other libraries (Liger, quack) for comparison, if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

from normlab.bench.cases import Outputs

# pyright: reportMissingImports=false


def calls(step: str, x: Tensor, g: Tensor, parameters: list[Tensor]) -> dict[str, Callable[[], Outputs]]:
    """Calls of other libraries by name, which return the same (state, input) as NormLab's step."""
    gain = parameters[0]
    known: dict[str, dict[str, Callable[[], Outputs]]] = {
        "add + norm (pre)": {"liger": lambda: _liger_add(x, g, gain), "quack": lambda: _quack_add(x, g, gain)},
        "RMSNorm": {"liger": lambda: _liger_norm(x, gain), "quack": lambda: _quack_norm(x, gain)},
        "4 streams, write (mhc)": {"liger": lambda: _liger_write_streams(x, g, *parameters)},
        "4 streams, sum + norm (mhc)": {"liger": lambda: _liger_read_streams(x, *parameters)},
        "4 streams, coefficients (mhc)": {"liger": lambda: _liger_coefficients(x, *parameters)},
    }
    homes = {"liger": "liger_kernel", "quack": "quack"}
    return {name: call for name, call in known.get(step, {}).items() if find_spec(homes[name]) is not None}


def _liger_add(x: Tensor, g: Tensor, gain: Tensor) -> Outputs:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    seen, state = LigerFusedAddRMSNormFunction.apply(g, x, gain, 1e-6, 0.0, "llama", False)
    return state, seen


def _liger_norm(x: Tensor, gain: Tensor) -> Outputs:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return x.view_as(x), LigerRMSNormFunction.apply(x, gain, 1e-6, 0.0, "llama", False)


def _liger_write_streams(x: Tensor, g: Tensor, post: Tensor, comb: Tensor) -> Outputs:
    from liger_kernel.ops.mhc import LigerMHCPostResFunction

    # Its matrix is indexed by (stream written, stream read).
    return (LigerMHCPostResFunction.apply(x, g, post, comb.mT),)


def _liger_read_streams(x: Tensor, gain: Tensor, pre: Tensor) -> Outputs:
    from liger_kernel.ops.mhc import LigerMHCPreFunction

    # Two kernels: the sum is rounded to the stream's dtype before the norm, and so is its gradient on the way back.
    return x.view_as(x), _liger_norm(LigerMHCPreFunction.apply(x, pre), gain)[1]


def _liger_coefficients(x: Tensor, weight: Tensor, base: Tensor, *scales: Tensor) -> Outputs:
    from liger_kernel.ops.mhc import LigerMHCCoeffsFunction

    # Its weight is transposed and of the state's dtype, which its tensor cores need.
    projection = weight.T.to(x.dtype)
    options = (False, 20, 1e-6, 1e-6, 1e-6, 2.0)  # no fp32; rounds; epsilons of norm, pre and Sinkhorn; largest post
    return x.view_as(x), *LigerMHCCoeffsFunction.apply(x, projection, base, *scales, *options)


def _quack_add(x: Tensor, g: Tensor, gain: Tensor) -> Outputs:
    from quack import rmsnorm

    seen, state = rmsnorm(g, gain, residual=x, eps=1e-6, prenorm=True)
    return state, seen


def _quack_norm(x: Tensor, gain: Tensor) -> Outputs:
    from quack import rmsnorm

    return x.view_as(x), rmsnorm(x, gain, eps=1e-6)
