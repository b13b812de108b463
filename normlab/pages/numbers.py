"""Format numbers for pages and tables: significant digits, units, minus sign, a dash for missing values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

NONE = "–"


def finite_or_none(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def fixed(value: Any, decimals: int = 4) -> str:
    found = finite_or_none(value)
    return NONE if found is None else f"{found:.{decimals}f}".replace("-", "−")


def signed(value: Any, decimals: int = 4) -> str:
    found = finite_or_none(value)
    return NONE if found is None else f"{found:+.{decimals}f}".replace("-", "−")


def minus(text: str) -> str:
    """A text with a minus sign in front of negative numbers instead of a hyphen."""
    return re.sub(r"(?<![\w.)])-(?=\.?\d)", "−", text)


def rate(value: Any) -> str:
    """A learning rate in scientific notation: 6e-4, 1.25e-3."""
    found = finite_or_none(value)
    if found is None or found <= 0:
        return NONE if found is None else f"{found:g}".replace("-", "−")
    mantissa, power = f"{found:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def format_count(value: Any) -> str:
    """Three digits and a unit: 512, 33.6M, 1.2B."""
    found = finite_or_none(value)
    if found is None:
        return NONE
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(found) >= 0.9995 * size:
            return f"{found / size:.3g}{unit}"
    return f"{found:.3g}"


def ratio(value: float) -> str:
    """Two digits of a factor or a ratio, and all before the point: 0.27, 3.5, 2,550."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def memory(value: Any) -> str:
    found = finite_or_none(value)
    if found is None:
        return NONE
    size, units = float(found), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def duration(value: Any) -> str:
    found = finite_or_none(value)
    if found is None:
        return NONE
    if found < 60:
        return f"{found:.3g} s"
    minutes = round(found / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def decimals(spreads: Iterable[float | None]) -> int:
    """Number of decimals that shows two digits of the smallest nonzero spread."""
    known = [spread for spread in spreads if spread is not None and spread > 0 and math.isfinite(spread)]
    return max(3, min(6, 1 - math.floor(math.log10(min(known))))) if known else 4


def join_names(names: Iterable[str]) -> str:
    """Join names as "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
