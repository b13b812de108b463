"""A run in a process of its own, which waits where it is told; what it says goes to files beside its folder.

step    before step 8, for ever
signal  before step 8, until a signal has come
save    in the middle of its second checkpoint, for ever
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from normlab.train.config import TrainConfig
from normlab.train.storage import checkpoint
from normlab.train.trainer import Trainer, train

STEP = 8


def waits(folder: Path, where: str) -> None:
    ready = folder.with_suffix(".ready")
    if where == "save":
        digest, partial = checkpoint.digest, ".step-00000008.partial"
        checkpoint.digest = lambda path: wait(ready) if partial in path.parts else digest(path)
        return
    gradient = Trainer._gradient

    def waiting(trainer: Trainer, parts):
        if trainer.step == STEP - 1:
            wait(ready, lambda: where == "signal" and trainer.interrupt.reason is not None)
        return gradient(trainer, parts)

    Trainer._gradient = waiting


def wait(ready: Path, until=lambda: False) -> None:
    ready.touch()
    while not until():
        time.sleep(0.01)


def main(config: str, folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        with folder.with_suffix(suffix).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    waits(folder, where)
    print(json.dumps(train(TrainConfig.from_dict(json.loads(config)), folder).to_dict()), flush=True)
