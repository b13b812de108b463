"""Which kernels can run here."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def status() -> dict[str, str | None]:
    """Backend → None where it can run, else why it cannot."""
    return {"reference": None, "triton": _why_not_triton()}


def _why_not_triton() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed (it comes with accelerator builds of torch)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "no step has a Triton kernel yet"
