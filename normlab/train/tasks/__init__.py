"""Training tasks by name: next-token prediction, masked tokens, image classification."""

from __future__ import annotations

from normlab.errors import unknown
from normlab.train.tasks.base import Data, Task
from normlab.train.tasks.images import ImagesTask, ImageTrainConfig
from normlab.train.tasks.language import Language, LanguageTrainConfig
from normlab.train.tasks.masked import MaskedTask, MaskedTrainConfig

__all__ = [
    "TASKS",
    "Data",
    "ImageTrainConfig",
    "LanguageTrainConfig",
    "MaskedTrainConfig",
    "Task",
    "find_task",
]

TASKS: dict[str, Task] = {task.name: task for task in (Language(), MaskedTask(), ImagesTask())}


def find_task(name: str) -> Task:
    """The task of a name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
