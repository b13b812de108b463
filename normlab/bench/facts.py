"""What it takes to repeat a figure: date, command, hardware and versions."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from normlab.utils.versions import versions

_PLACES = ("--out", "--plot")


def dated(*peers: str) -> dict[str, Any]:
    """The facts, with the time of now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **facts(*peers)}


def facts(*peers: str) -> dict[str, Any]:
    """Command, hardware, and versions, also those of the packages that we are compared with."""
    return {
        "command": command(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "cores": os.cpu_count(),
        **versions(),
        **{name: version(name) for name in peers},
    }


def command(words: list[str]) -> str:
    """What was typed, without the files that one machine kept its results in: they decide nothing."""
    program, rest = Path(words[0]), words[1:]
    places = {i + k for i, word in enumerate(rest) if word in _PLACES for k in (0, 1)}
    named = tuple(f"{place}=" for place in _PLACES)
    kept = [word for i, word in enumerate(rest) if i not in places and not word.startswith(named)]
    is_script = program.parent.name == "benchmarks"
    return " ".join([f"python benchmarks/{program.name}" if is_script else "normlab", *kept])


def processor() -> str:
    """The processor's name, as Linux has it or else Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
