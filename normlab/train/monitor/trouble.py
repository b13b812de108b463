"""What is left of a step that went wrong: the layer at fault, and the batch."""

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
    """Where the parts of a step's batch go wrong, on whichever rank they do; all ranks call it and hear the same."""
    mine = []
    for part in parts:
        with autocast():
            mine.append(first_nonfinite(model, part.inputs, part.targets, **part.options))
        reshard(model)
    found = [Diagnosis(**facts) for rank in group.gather([asdict(one) for one in mine]) for facts in rank]
    # A bad value on one rank reaches the gradients of all: where it was heard forwards it is at home.
    return min(found, key=lambda one: (one.forward is None, one.backward is None, -one.norm))


def keep(parts: Sequence[Batch], folder: Path, step: int, rank: int) -> Path:
    """Write a rank's part of a bad batch down, to look at or to try again: inputs, targets, documents."""
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
