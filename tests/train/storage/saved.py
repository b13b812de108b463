"""A small run that is saved and goes on, and ways to spoil what it saved."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import torch

import normlab
from normlab.probes.sharded import whole
from normlab.train.distributed import ALONE, Group, initialise, shard
from normlab.train.storage.checkpoint import Checkpoints

SIZE = {"depth": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "hidden": 48}


class Run:
    """A small training run whose batches come from every random state there is."""

    def __init__(self, group: Group = ALONE, scheme: str = "rezero", seed: int = 7, lr: float = 1e-2):
        self.group = group
        model = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **SIZE), device="meta")
        self.model = initialise(shard(model, group), group, seed)
        self.optimiser = torch.optim.AdamW(self.model.param_groups(lr=lr, weight_decay=0.1))
        random.seed(seed + group.rank)
        np.random.seed(seed + group.rank)
        torch.manual_seed(seed + group.rank)

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        tokens = torch.randint(0, 61, (2, 9))
        tokens[0, 0], tokens[1, 0] = random.randrange(61), np.random.randint(61)
        # Both keep a second normal number back for the next call.
        weight = 1 + 0.1 * random.gauss(0, 1) + 0.1 * np.random.standard_normal()
        self.optimiser.zero_grad()
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:]) * weight
        loss.backward()
        self.optimiser.step()
        self.model.after_step()
        return loss.item()

    def save(self, folder: Path, step: int, keep: int = 2, **extra) -> None:
        Checkpoints(folder, keep, self.group).save(step, model=self.model, optimiser=self.optimiser, extra=extra)

    def load(self, folder: Path) -> tuple[int, dict] | None:
        return Checkpoints(folder, group=self.group).load(self.model, self.optimiser)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and everything the optimiser remembers, whole."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = whole(parameter.detach()).clone()
            for key, value in self.optimiser.state[parameter].items():
                found[f"{name}/{key}"] = whole(value).clone()
        return found


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def full_disk(*_, **__) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after_some_bytes(path: Path, mode: str = "r", *args, **kwargs):
    if "w" in mode and path.suffix == ".safetensors":
        path.touch()
        full_disk()
    return path.__class__._open(path, mode, *args, **kwargs)  # type: ignore[attr-defined]
