"""What computed a result: kept beside every run, checkpoint, comparison and benchmark."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from normlab import __version__

_PATIENCE = 5.0
"""Seconds for git, which may have to look at every file."""


def versions() -> dict[str, str]:
    """Of NormLab, torch and Python; where NormLab runs from a checkout, also its commit: one version has many."""
    commit = commit_of(Path(__file__).parents[1])
    known = {"normlab": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return known | ({"commit": commit} if commit else {})


@cache
def commit_of(checkout: Path) -> str | None:
    """The commit that a folder is at, with -dirty where files differ from it; None where there is no telling."""
    if not (checkout / ".git").exists():
        return None
    # No lock is taken for what git would like to remember: many runs ask at once.
    ask = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(ask, cwd=checkout, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
