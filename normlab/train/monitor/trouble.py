"""Diagnose a bad training step: find the layer at fault on any rank, and save the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from normlab.data import Batch
from normlab.models.transformer import Transformer
from normlab.probes.first_nonfinite import Diagnosis, first_nonfinite
from normlab.probes.sharded import reshard
from normlab.train.distributed import Group
from normlab.utils.files import file_error, replacing


def diagnose(
    model: Transformer, parts: Sequence[Batch], group: Group, autocast: Callable[[], AbstractContextManager[Any]]
) -> Diagnosis:
    """Find where the parts of a step's batch go wrong, on any rank. All ranks call it and get the same answer."""
    mine = []
    for part in parts:
        with autocast():
            mine.append(first_nonfinite(model, part.inputs, part.targets, **part.options))
        reshard(model)
    found = [Diagnosis(**facts) for rank in group.gather([asdict(one) for one in mine]) for facts in rank]
    # A bad value on one rank reaches the gradients of all: the rank with a bad forward pass has its cause.
    return min(found, key=lambda one: (one.forward is None, one.backward is None, -one.norm))


def keep(parts: Sequence[Batch], folder: Path, step: int, rank: int) -> Path:
    """Save a rank's part of a bad batch, for inspection: inputs, targets, documents."""
    columns = zip(Batch._fields, zip(*parts, strict=True), strict=True)
    tensors = {name: torch.cat(column).cpu() for name, column in columns if column[0] is not None}
    path = folder / (f"step-{step:08d}-rank-{rank}.safetensors" if rank else f"step-{step:08d}.safetensors")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise file_error("make", error, folder) from error
    with replacing(path) as part:
        save_file(tensors, part)
    return path
