"""Packages that only some users need: imported when first used, named with the extra that brings them."""

from __future__ import annotations

import importlib
from typing import Any

from normlab.errors import NormLabError


def need(package: str, extra: str, what: str) -> Any:
    """Import `package`, which `what` cannot do without."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise NormLabError(f'{what} needs {package}, which is missing; try: pip install "normlab[{extra}]"') from None
