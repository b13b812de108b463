"""Choices that several rooms offer, by name; free of torch, so that the command line can show them."""

from __future__ import annotations

from typing import Literal

Kernels = Literal["auto", "reference", "triton"]
"""auto: Triton where it can run. Asking for Triton where it cannot is an error."""

Topology = Literal["serial", "parallel"]
"""Branches of a block one after the other, or all at the same state."""

Stream = Literal["auto", "fp32", "bf16"]
"""Number format of the residual stream."""

Boundaries = Literal["packed", "respected"]
"""Whether a sequence may look across the documents packed into it."""
