"""Literal types of options that several packages share; importable without torch, for the command line."""

from __future__ import annotations

from typing import Literal

Kernels = Literal["auto", "reference", "triton"]
"""auto: Triton if it can run, else the reference. Requesting triton where it cannot run is an error."""

Topology = Literal["serial", "parallel"]
"""Attention and MLP one after the other, or both on the same state."""

ValueResidual = Literal["none", "mean", "learned"]
"""How much of the first block's values later blocks attend with: nothing, half, or a learned part."""

Stream = Literal["auto", "fp32", "bf16"]
"""Number format of the residual stream."""

Boundaries = Literal["packed", "respected"]
"""Whether attention may cross document boundaries in a packed sequence."""
