"""The command `normlab doctor`: device, versions, kernels, extras. Importing this does not import torch."""

from __future__ import annotations

import json
import platform
from typing import Any

import normlab
from normlab.cli.extras import extras, version
from normlab.utils.text import counted

_OPTIONAL = ("triton", "tokenizers", "transformers", "liger-kernel", "plotly")


def doctor(json: bool = False) -> None:
    """Show device and versions, which kernels can run here or why not, and which extras are missing for what.

    For example:
      normlab doctor
      normlab doctor --json

    Args:
        json: Print JSON.
    """
    print_findings(as_json=json)


def findings() -> dict[str, Any]:
    """Facts about this machine as plain values."""
    import torch

    from normlab.kernels import backends

    return {
        "normlab": normlab.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "device": _device(),
        "bf16": "native" if _native_bf16() else "emulated: works, slowly",
        "packages": {name: version(name) or "not installed" for name in _OPTIONAL},
        "kernels": backends.status(),
        "extras": {extra.name: extra.line for extra in extras()},
        "schemes": normlab.list_schemes(),
    }


def print_findings(*, as_json: bool = False) -> None:
    """Print the findings as a table, or as JSON."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = findings()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in found.items():
        if isinstance(value, dict):
            for key, detail in value.items():
                table.add_row(f"[bold]{name}[/bold] {key}", escape(str(detail)))
        else:
            table.add_row(f"[bold]{name}[/bold]", ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table, highlight=False)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
    if torch.backends.mps.is_available():
        return "Apple GPU (mps)"
    return f"CPU, {counted(torch.get_num_threads(), 'thread')} (torch sees no accelerator)"


def _native_bf16() -> bool:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
