"""Choice of the kernel backend: the PyTorch reference or Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from normlab.choices import Kernels
from normlab.errors import NormLabError, unknown
from normlab.kernels.compiler import register_fallbacks

MAX_DIM = 16384
"""Widest row that one Triton program holds in registers."""

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(requested: str, tensor: torch.Tensor) -> Literal["reference", "triton"]:
    """The backend for an operation on `tensor`; `requested` is auto, reference or triton."""
    chosen = _choose(requested, tensor)
    if chosen == "triton":
        register_fallbacks()
    return chosen


def _choose(requested: str, tensor: torch.Tensor) -> Literal["reference", "triton"]:
    if requested == "reference":
        return "reference"
    if requested == "auto":
        return "triton" if tensor.is_cuda and _why_not(tensor) is None else "reference"
    if requested != "triton":
        raise unknown("kernels", requested, get_args(Kernels))
    reason = _why_not(tensor)
    if reason is not None:
        raise NormLabError(f"kernels='triton' cannot run: {reason}; use kernels='auto' or 'reference'")
    return "triton"


def _why_not(tensor: torch.Tensor) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed (it comes with accelerator builds of torch)"
    if not tensor.is_cuda and not interpreting():
        return f"the tensor is on {tensor.device.type}, not on a CUDA device"
    if tensor.dtype not in _DTYPES:
        return f"{tensor.dtype} is not one of float32, bfloat16, float16"
    if tensor.shape[-1] > MAX_DIM:
        return f"width {tensor.shape[-1]} exceeds {MAX_DIM}"
    return None


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on any device (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def status() -> dict[str, str]:
    """For `normlab doctor`: every backend, whether it can run here, and when `auto` uses it."""
    if not _HAS_TRITON:
        triton = "no: triton is not installed (it comes with accelerator builds of torch)"
    elif torch.cuda.is_available():
        triton = f"usable; auto takes it for fp32, bf16 and fp16 up to width {MAX_DIM}"
    else:
        triton = "no: torch sees no CUDA device" + (" (but TRITON_INTERPRET=1 is set)" if interpreting() else "")
    return {"reference": "usable; auto takes it wherever Triton cannot run", "triton": triton}
