"""The tasks that a run can have, by name."""

from __future__ import annotations

from typing import Literal

from normlab.errors import unknown
from normlab.train.tasks.base import Data, Task
from normlab.train.tasks.images import ImagesTask
from normlab.train.tasks.language import Language
from normlab.train.tasks.masked import MaskedTask

__all__ = ["TASKS", "Data", "Task", "TaskName", "find_task"]

TaskName = Literal["language", "masked", "images"]

TASKS: dict[str, Task] = {task.name: task for task in (Language(), MaskedTask(), ImagesTask())}


def find_task(name: str) -> Task:
    """The task of a name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
