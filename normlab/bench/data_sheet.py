"""FLOP/s of dense bf16 matrix products as data sheets state them, by the name of a device."""

from __future__ import annotations

import re

# Without sparsity, which data sheets often count twofold. The first name that occurs in a device's name counts.
_RATES = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100 80GB HBM3", 989e12),  # the SXM module
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
)


def data_sheet_flops(device: str) -> float | None:
    """The data sheet's FLOP/s for a device by its name; None if it is not known."""
    # A part of a GPU has the whole GPU's name with MIG.
    if re.search(r"\bMIG\b", device):
        return None
    return next((rate for name, rate in _RATES if re.search(rf"\b{name}\b", device)), None)
