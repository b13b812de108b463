"""What a training run is made of: model, data, optimiser, schedule, and how it is watched.

Free of torch until a configuration is written down, so that the command line can show every field in its help.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from normlab.choices import Boundaries
from normlab.errors import NormLabError, unknown
from normlab.models.config import TransformerConfig
from normlab.train import schedule
from normlab.train.tasks import TASKS, Task, TaskName, find_task

Sink = Literal["tensorboard", "wandb", "trackio"]

NOT_DECISIVE = ("vocab_size", "classes", "saves", "keep", "sinks")
"""Fields that the result does not depend on, or, vocabulary and classes, only through others."""

ADDED_LATER: tuple[str, ...] = ("stop_hopeless", "continued")
"""Fields that version 0.1 did not have. At its default such a field is left out of a run's hash, so that stored runs
keep their names."""

DEFAULT_TASK: TaskName = "language"

NOT_EVERYWHERE = frozenset(name for task in TASKS.values() for name in task.fields)
"""Fields that only some tasks have."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; everything in it decides the result, and its hash names the run."""

    task: TaskName = DEFAULT_TASK
    """What is learnt: the next token of a text, masked tokens of a text, or the classes of images."""
    model: TransformerConfig = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    """The model, of the task's kind. What the data says of it (vocabulary, classes) is set when that is read."""

    data: tuple[str, ...] = ()
    """Text: files, folders, globs, hf:NAME; "python", the default, is the standard library of the running Python.
    Images: folders with a folder for every class; "digits", the default, comes with scikit-learn."""
    val_data: tuple[str, ...] = ()
    """Data to evaluate on; none: a share of the documents or images in data."""
    val_fraction: float = 0.0
    """That share; 0: 0.02 of a text, 0.2 of images."""
    tokenizer: str = "bytes"
    """bytes, bpe:N (trained on the data), a file of the tokenizers package, or a Hugging Face id."""
    boundaries: Boundaries = "packed"
    """Sequences run across documents, or attention stays within each."""
    mask: float = 0.15
    """Share of the tokens that are masked and to be found."""
    shift: int = 0
    """Pixels by which images are moved at random while training, at most; 0: none."""
    flip: bool = False
    """Mirror every other image while training."""

    tokens: int = 2_000_000
    """Tokens to train on; 33M and 1.5B are understood on the command line."""
    images: int = 100_000
    """Images to train on, those seen again counted again; 200k is understood on the command line."""
    length: int = 256
    """Tokens a sequence."""
    batch: int = 16
    """Sequences or images a step, over all ranks and accumulated parts."""
    accumulate: int = 1
    """Parts that a step's batch is cut into, to save memory."""

    optimiser: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for hidden matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Highest learning rate."""
    weight_decay: float = 0.1
    """Decay of the parameters that the scheme lets decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two rates of forgetting."""
    eps: float = 1e-8
    """AdamW's floor."""
    clip: float = 1.0
    """Largest norm of the gradient; inf: none."""
    z_loss: float = 0.0
    """Weight of the mean square of the log-normaliser of the logits."""
    schedule: schedule.Kind = "cosine"
    """Course of the learning rate after warm-up."""
    warmup: float = 0.05
    """Share of the steps over which the rate rises."""
    final: float = 0.1
    """The last rate as a share of the highest."""
    decay: float = 0.2
    """Share of the steps over which wsd falls."""
    base_dim: int | None = None
    """Width at which the rate was tuned: initialisation and rates are carried over from there (muP)."""

    seed: int = 0
    """Of initialisation and of the order of the data."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of matrix products; auto: bf16 on a GPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the model; auto: on a GPU."""

    evals: int = 10
    """Evaluations in the course of the run, the last at its end."""
    eval_tokens: int | None = None
    """Tokens of an evaluation, at most; none: a tenth of tokens, from 10,000 to 200,000."""
    saves: int = 10
    """Checkpoints in the course of the run; 0: only when it is stopped, and none at its end to continue it from."""
    keep: int = 2
    """Checkpoints that are kept."""
    trouble: Literal["stop", "skip", "rollback", "none"] = "skip"
    """What to do about a loss that is not finite or a spike: stop, skip the step, or go back to a checkpoint. none, for
    studies of divergence: every step is taken, gradients are not clipped (clip is inf), and a run ends as diverged
    when loss or gradient are not finite."""
    spike: float = 10.0
    """Robust standard deviations above the running median at which a loss is a spike."""
    stop_hopeless: bool = False
    """Stop a run that is stuck 300 steps after warm-up: its loss is not 0.1 below the entropy of single tokens."""
    sinks: tuple[Sink, ...] = ()
    """Where metrics go besides metrics.jsonl."""
    continued: tuple[int, ...] = ()
    """Steps at which the run had ended and was continued with a larger budget; `train --resume` sets it."""

    def __post_init__(self) -> None:
        task = self.task_object
        self._settle(task)
        for name in ("batch", "accumulate", "keep"):
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("evals", "saves"):
            if getattr(self, name) < 0:
                raise NormLabError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("lr", "eps", "clip", "spike"):
            if not getattr(self, name) > 0:
                raise NormLabError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0.0 <= self.z_loss < math.inf:
            raise NormLabError(f"z_loss must be a number from 0 on, got {self.z_loss}; try 1e-4")
        if not 0.0 <= self.weight_decay < math.inf:
            raise NormLabError(f"weight_decay must be a number from 0 on, got {self.weight_decay}; try 0.1")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise NormLabError(f"betas must lie in [0, 1), got {self.betas}; try 0.9 0.95")
        check_seed(self.seed)
        if not 0.0 <= self.warmup <= 1.0:
            raise NormLabError(f"warmup must lie in [0, 1], a share of the steps, got {self.warmup}; try 0.05")
        if self.batch % self.accumulate:
            raise NormLabError(f"batch {self.batch} cannot be cut into {self.accumulate} equal parts; try accumulate 1")
        task.check(self)
        schedule.check(total=self.steps, **self._course)
        object.__setattr__(self, "model", task.fitted(self))

    def _settle(self, task: Task) -> None:
        """What the task says where the user says nothing, and nothing that it does not know."""
        for name, value in task.settled(self).items():
            object.__setattr__(self, name, value)
        if self.trouble == "none":
            object.__setattr__(self, "clip", math.inf)
        if not isinstance(self.model, task.model):
            raise NormLabError(
                f"task {task.name} trains a model of a {task.model.__name__}, got a {type(self.model).__name__}; "
                f"try task {_task_of(self.model)!r}"
            )
        for name in self.foreign_fields(task.name):
            if getattr(self, name) != _DEFAULTS[name]:
                raise NormLabError(f"task {task.name} has no {name}; leave it out, or choose another task")

    @property
    def task_object(self) -> Task:
        """What the run learns, with all that goes with it."""
        return find_task(self.task)

    @staticmethod
    def foreign_fields(task: str) -> list[str]:
        """The fields that a task does not have."""
        return sorted(NOT_EVERYWHERE - {*find_task(task).fields})

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.task_object.steps(self)

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.task_object.sequence(self)

    @property
    def tokens_in_all(self) -> int:
        """Tokens that the blocks see in the course of the run."""
        return self.steps * self.batch * self.sequence

    @property
    def warmup_steps(self) -> int:
        """Steps over which the rate rises."""
        return round(self.warmup * self.steps)

    @property
    def _course(self) -> dict[str, Any]:
        return {"kind": self.schedule, "warmup": self.warmup_steps, "final": self.final, "decay_fraction": self.decay}

    def rate(self, step: int) -> float:
        """The learning rate at `step`, as a share of the highest."""
        return schedule.multiplier(step, total=self.steps, **self._course)

    def for_data(self, data: Any) -> TrainConfig:
        """The same with as many answers as the data asks for: its vocabulary, or its classes."""
        return dataclasses.replace(self, model=self.task_object.with_answers(self, data))

    @property
    def identity(self) -> str:
        """A short hash of everything that decides the result."""
        known = self.shared_dict()
        # Runs had names before there were tasks to choose from.
        if known["task"] == DEFAULT_TASK:
            del known["task"]
        usual = [name for name, value in LATER_DEFAULTS.items() if getattr(self, name) == value]
        known = {name: value for name, value in known.items() if name not in usual}
        known = {name: value for name, value in (known | known.pop("model")).items() if name not in NOT_DECISIVE}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """A folder's name that says what the run is."""
        scheme = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.model.scheme_object.label).strip("-")
        return f"{scheme}-lr{self.lr:g}-seed{self.seed}-{self.identity}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `TrainConfig.from_dict` reads them back."""
        foreign = self.foreign_fields(self.task)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in foreign}
        if not self.continued:
            # Comparisons of version 0.1 go on: their files do not know it.
            del fields["continued"]
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return plain | {"model": self.model.to_dict(), "clip": None if math.isinf(self.clip) else self.clip}

    def shared_dict(self) -> dict[str, Any]:
        """The same without paths of this machine: a scheme in a file is named by its content, not by its folder."""
        return self.to_dict() | {"model": self.model.to_dict() | {"scheme": self.model.scheme_object.shared_text}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("field of a run", name, known)
        given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        if given.get("clip", 1.0) is None:
            given["clip"] = math.inf
        task = find_task(values.get("task", DEFAULT_TASK))
        given["model"] = task.model(**values.get("model", {}))
        return cls(**given)

    @classmethod
    def preset(cls, size: str, **changes: Any) -> TrainConfig:
        """A run of a named size: fields of the model and of the run alike can be changed."""
        task = find_task(changes.get("task", DEFAULT_TASK))
        if size not in task.model.presets:
            raise unknown("preset", size, task.model.presets)
        of_model = {f.name for f in dataclasses.fields(task.model)}
        inner = {name: value for name, value in changes.items() if name in of_model}
        outer = {name: value for name, value in changes.items() if name not in of_model}
        sizes = task.model.presets[size]
        return cls(**(task.of_preset(sizes) | outer), model=task.model(**{**sizes, **inner}))


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}

LATER_DEFAULTS = {name: _DEFAULTS[name] for name in ADDED_LATER}
"""What a run of version 0.1 has in its fields that were added later."""


def check_seed(seed: int) -> None:
    """Raise for a number that torch's generators do not take."""
    if not -(2**63) <= seed < 2**64:
        raise NormLabError(f"seed must fit into 64 bits, got {seed}; try 0")


def _task_of(model: TransformerConfig) -> str:
    return next((task.name for task in TASKS.values() if task.model is type(model)), DEFAULT_TASK)
