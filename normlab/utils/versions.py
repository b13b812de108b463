"""Software versions and git commit, stored with every run, checkpoint, comparison and benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from normlab import __version__

_CHECKOUT = Path(__file__).parents[2]
"""The folder that holds the package: the root of a checkout."""
_PATIENCE = 5.0
"""Timeout in seconds for git, which may have to read every file."""


def versions() -> dict[str, str]:
    """Versions of NormLab, torch and Python, and NormLab's git commit if it runs from a checkout."""
    commit = commit_of(_CHECKOUT)
    known = {"normlab": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return known | ({"commit": commit} if commit else {})


def is_unnamed_copy() -> bool:
    """Whether NormLab runs from a copy of a checkout whose commit is not known. An installed version names itself."""
    return (_CHECKOUT / "pyproject.toml").is_file() and commit_of(_CHECKOUT) is None


@cache
def commit_of(checkout: Path) -> str | None:
    """The git commit of a folder, with -dirty if files differ from it; None if unknown.

    The variable NORMLAB_COMMIT names it in a copy of a checkout whose .git is missing or does not follow it.
    """
    if told := os.environ.get("NORMLAB_COMMIT"):
        return told
    if not (checkout / ".git").exists():
        return None
    # Without optional locks, because many runs may ask at once.
    ask = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(ask, cwd=checkout, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
