"""Random-number-generator states of Python, numpy, torch and the GPU, in one safetensors file per rank."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from normlab.utils.files import write_atomically


def write_random_states(path: Path, device: torch.device) -> None:
    """Save the state of every generator of this process."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    states = {
        "python": torch.tensor(words),
        "python-gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss]),
        "numpy-gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    write_atomically(path, save(states))


def restore_random_states(path: Path, device: torch.device) -> None:
    """Restore the state of every generator."""
    states = load(path.read_bytes())
    random.setstate((3, tuple(states["python"].tolist()), next(iter(states["python-gauss"].tolist()), None)))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = states["numpy-gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
