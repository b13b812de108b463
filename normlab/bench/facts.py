"""Metadata of a benchmark: date, command, hardware and versions."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from normlab.utils.versions import versions

_PLACES = ("--out", "--plot")


def dated(*peers: str) -> dict[str, Any]:
    """`facts` with the current time."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **facts(*peers)}


def facts(*peers: str) -> dict[str, Any]:
    """Command, hardware and versions, also those of the packages `peers`."""
    return {
        "command": command(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "cores": os.cpu_count(),
        **versions(),
        **{name: _version(name) for name in peers},
    }


def _version(package: str) -> str:
    # A checkout on the path can be imported without being installed.
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def command(words: list[str]) -> str:
    """The command line without output files, which do not affect the results."""
    program, rest = Path(words[0]), words[1:]
    places = {i + k for i, word in enumerate(rest) if word in _PLACES for k in (0, 1)}
    named = tuple(f"{place}=" for place in _PLACES)
    kept = [word for i, word in enumerate(rest) if i not in places and not word.startswith(named)]
    is_script = program.parent.name == "benchmarks"
    return " ".join([f"python benchmarks/{program.name}" if is_script else "normlab", *kept])


def processor() -> str:
    """Name of the processor, from Linux or else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
