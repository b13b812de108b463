"""Training of one run: configuration, training loop, checkpoints, stored runs.

from normlab.train import TrainConfig, train
result = train(TrainConfig(model=DecoderConfig(scheme="peri"), data=("book.txt",)), Path("runs/peri"))
run = normlab.load_run("runs/peri")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig
    from normlab.train.run import Run, load_run
    from normlab.train.tasks import ImageTrainConfig, LanguageTrainConfig, MaskedTrainConfig
    from normlab.train.trainer import TrainResult, train

__all__ = [
    "ImageTrainConfig",
    "LanguageTrainConfig",
    "MaskedTrainConfig",
    "Run",
    "TrainConfig",
    "TrainResult",
    "load_run",
    "train",
]

__getattr__ = loader(
    __name__,
    {
        "ImageTrainConfig": "tasks",
        "LanguageTrainConfig": "tasks",
        "MaskedTrainConfig": "tasks",
        "Run": "run",
        "TrainConfig": "config",
        "TrainResult": "trainer",
        "load_run": "run",
        "train": "trainer",
    },
    renamed={"Result": "normlab.train.TrainResult"},
)
