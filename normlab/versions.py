"""What computed a result: kept beside every run, checkpoint, comparison and benchmark."""

from __future__ import annotations

import platform

import torch

from normlab import __version__


def versions() -> dict[str, str]:
    return {"normlab": __version__, "torch": torch.__version__, "python": platform.python_version()}
