"""Configuration of a training run: model, data, optimiser, learning-rate schedule, evaluation, checkpoints.

`TrainConfig` holds what all tasks share; the fields of a task are in its own class (`LanguageTrainConfig`,
`MaskedTrainConfig`, `ImageTrainConfig` in `normlab.train.tasks`). `TrainConfig(task="images", shift=1)` makes an
`ImageTrainConfig`, as `pathlib.Path` makes the path of the platform.

Importing this does not import torch, so that `--help` is fast; making a configuration does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import tyro

from normlab.errors import NormLabError, advice_for, unknown
from normlab.models.config import TransformerConfig
from normlab.train import schedule
from normlab.utils.counts import Count
from normlab.utils.settings import field_names

if TYPE_CHECKING:
    from normlab.train.tasks import Task
    from normlab.train.transfer import Transfer

Sink = Literal["tensorboard", "wandb", "trackio"]
TaskName = Literal["language", "masked", "images"]

NOT_DECISIVE = ("vocab_size", "classes", "saves", "keep", "sinks", "branches", "cuda_graphs")
"""Fields that are left out of a run's hash: the result does not depend on them, or (vocabulary size, number of classes)
only through other fields; `not_decisive` knows the exception."""

_CHECKPOINTS = ("saves", "keep")
"""Which checkpoints there are."""

ADDED_LATER: tuple[str, ...] = ("stop_hopeless", "continued", "base_depth")
"""Fields that version 0.1 did not have. At its default such a field is left out of a run's hash, so that stored runs
keep their names."""

LEFT_OUT: tuple[str, ...] = ("continued", "branches", "val_sets", "base_depth", "cuda_graphs")
"""Fields that are not written at their defaults: files of version 0.1 do not have them, and their comparisons can be
resumed."""

DEFAULT_TASK: TaskName = "language"


def not_decisive(trouble: str) -> tuple[str, ...]:
    """Fields that the result of a run does not depend on, given its policy for bad steps."""
    # A rollback goes back to a checkpoint, so the run depends on which there are.
    return tuple(name for name in NOT_DECISIVE if trouble != "rollback" or name not in _CHECKPOINTS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of one training run. Everything in it decides the result, and its hash is part of the run's name.

    `TrainConfig(task=..., ...)` returns the class of the task; without `task`, a `LanguageTrainConfig`.
    """

    model_class: ClassVar[type[TransformerConfig]]
    """Configuration class of the model that the task trains."""
    budget: ClassVar[str]
    """Name of the field that holds the training budget."""

    task: TaskName = DEFAULT_TASK
    """Training task: language (predict the next token), masked (predict masked tokens) or images (classify images)."""
    model: TransformerConfig
    """Model. Its vocabulary size or number of classes is set when the data is read."""

    data: tuple[str, ...]
    """Training data."""
    val_data: tuple[str, ...] = ()
    """Validation data; none: a fraction of the training data is held out."""
    val_fraction: float
    """Fraction of the data held out for validation where val_data is empty."""

    batch: int = 16
    """Batch size: sequences or images per optimiser step, over all ranks and accumulated parts."""
    accumulate: int = 1
    """Gradient accumulation: parts that a batch is split into, to save memory."""

    optimiser: Literal["adamw", "muon"] = "adamw"
    """AdamW for all parameters, or Muon for hidden matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay, on the parameters that the scheme lets decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's exponential decay rates of the moment estimates."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the denominator."""
    clip: float = 1.0
    """Gradient clipping: largest global gradient norm; inf: no clipping."""
    z_loss: float = 0.0
    """Weight of the z-loss, the mean square of the log-partition function of the logits."""
    schedule: schedule.Kind = "cosine"
    """Learning-rate schedule after warm-up."""
    warmup: float = 0.05
    """Linear warm-up: up to 1 a fraction of all steps, above 1 a number of steps."""
    final: float = 0.1
    """Final learning rate, as a fraction of the peak."""
    decay: float = 0.2
    """Length of the decay phase of the wsd schedules, as a fraction of all steps."""
    branches: tuple[Count, ...] = ()
    """Smaller budgets that branch off this run (schedule wsd or wsd-linear, warm-up in steps):
    the whole state is kept where a run of such a budget would begin to decay."""
    base_dim: int | None = None
    """Width at which the learning rate was tuned: initialisation and rates are transferred from there (muP)."""
    base_depth: int | None = None
    """Number of blocks at which the learning rate was tuned:
    the scheme's depth rule is applied from there (CompleteP)."""

    seed: int = 0
    """Random seed of the initialisation and of the data order."""
    device: str = "auto"
    """Device: auto, cpu, cuda, or cuda:1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; auto: bf16 on a GPU, else fp32."""
    compile: Literal["auto", "yes", "layers", "no"] = "auto"
    """Use torch.compile; layers: compile one block for all of them, in a time that does not grow with depth;
    auto: on a GPU; by layers for runs of minutes with CUDA graphs, and from 32 blocks on."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay training steps as CUDA graphs, which spares small models the time of launching kernels;
    auto: for AdamW on one GPU, compiled."""

    evals: int = 10
    """Evaluations during the run, the last one at its end."""
    saves: int = 10
    """Checkpoints during the run; 0: only when it is interrupted, and none at the end to continue from."""
    keep: int = 2
    """Newest checkpoints to keep."""
    trouble: Literal["stop", "skip", "rollback", "none"] = "skip"
    """On a non-finite loss or a loss spike: stop the run, skip the step, or roll back to a checkpoint.
    none, for studies of divergence: take every step without gradient clipping (clip is inf),
    and end the run as diverged when loss or gradient are not finite."""
    spike: float = 10.0
    """Threshold of a loss spike, in robust standard deviations above the running median."""
    stop_hopeless: bool = False
    """Stop a run that is stuck: 300 steps after warm-up its loss is not 0.1 below the unigram entropy."""
    sinks: tuple[Sink, ...] = ()
    """Where to log metrics besides metrics.jsonl."""
    continued: tyro.conf.Suppress[tuple[int, ...]] = ()
    """Steps at which the run had ended and was continued with a larger budget; `train --resume` sets it."""

    def __new__(cls, **fields: Any) -> Self:
        kind = config_class(fields.get("task", DEFAULT_TASK)) if cls is TrainConfig else cls
        _refuse_fields_of_other_tasks(kind, fields)
        return cast(Self, object.__new__(kind))

    def __post_init__(self) -> None:
        self.fill_defaults()
        self._check_model()
        if not self.data:
            # As an unset shell variable leaves it: the default would be other data than was meant.
            raise NormLabError("data is empty; name at least one source, or leave it out for the default")
        self._check_numbers()
        check_seed(self.seed)
        self.check()
        schedule.check_warmup(self.warmup, self.steps)
        schedule.check(total=self.steps, **self._schedule_options)
        schedule.check_branches(self)

    def _check_numbers(self) -> None:
        for name in ("batch", "accumulate", "keep"):
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}; {advice_for(self, name)}")
        for name in ("base_dim", "base_depth"):
            if (base := getattr(self, name)) is not None and base < 1:
                raise NormLabError(f"{name} must be at least 1, got {base}; leave it out for no transfer")
        for name in ("evals", "saves"):
            if getattr(self, name) < 0:
                raise NormLabError(f"{name} must not be negative, got {getattr(self, name)}; {advice_for(self, name)}")
        for name in ("lr", "eps", "clip", "spike"):
            if not getattr(self, name) > 0:
                raise NormLabError(f"{name} must be positive, got {getattr(self, name)}; {advice_for(self, name)}")
        for name in ("lr", "eps"):
            if math.isinf(getattr(self, name)):
                raise NormLabError(f"{name} must be finite, got inf; {advice_for(self, name)}")
        if not 0.0 <= self.z_loss < math.inf:
            raise NormLabError(f"z_loss must be a number from 0 on, got {self.z_loss}; try 1e-4")
        if not 0.0 <= self.weight_decay < math.inf:
            raise NormLabError(f"weight_decay must be a number from 0 on, got {self.weight_decay}; try 0.1")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise NormLabError(f"betas must lie in [0, 1), got {self.betas}; try 0.9 0.95")
        if self.batch % self.accumulate:
            raise NormLabError(f"batch {self.batch} cannot be cut into {self.accumulate} equal parts; try accumulate 1")

    def fill_defaults(self) -> None:
        """Set the fields whose default depends on the task or on other fields."""
        if not (self.val_fraction or self.val_data):
            raise NormLabError(
                "val_fraction must lie between 0 and 1, got 0: a run needs validation data; "
                f"leave it out for {type(self).val_fraction:g}, or name val_data"
            )
        # With val_data nothing is held out, and 0 says so: such a run is the same as with the default.
        self._set("val_fraction", self.val_fraction or type(self).val_fraction)
        if self.trouble == "none":
            self._set("clip", math.inf)

    def check(self) -> None:
        """Raise where the fields of the task do not make sense."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        raise NotImplementedError

    @property
    def sequence(self) -> int:
        """Tokens per sample."""
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        # Frozen: fields are only set while the configuration is made.
        object.__setattr__(self, name, value)

    def _check_model(self) -> None:
        if self.task != type(self).task:
            raise NormLabError(
                f"{type(self).__name__} has the task {type(self).task!r}, got {self.task!r}; "
                f"make a TrainConfig(task={self.task!r}, ...)"
            )
        if not isinstance(self.model, self.model_class):
            raise NormLabError(
                f"task {self.task} trains a model of a {self.model_class.__name__}, got a {type(self.model).__name__}; "
                f"try task {_task_of(self.model)!r}"
            )

    @property
    def task_object(self) -> Task:
        """The task: how data is read, batched and evaluated."""
        from normlab.train.tasks import find_task

        return find_task(self.task)

    @property
    def transfer(self) -> Transfer | None:
        """The rules that carry the learning rate over from the base width and depth; None without a base."""
        from normlab.train.transfer import Transfer

        return Transfer.to(self.model, self.base_dim, self.base_depth)

    @property
    def design(self) -> TransformerConfig:
        """The model to build: `model` with the scheme's rule for the depth applied."""
        return self.model if self.transfer is None else self.transfer.design(self.model)

    @property
    def tokens_in_all(self) -> int:
        """Tokens that the blocks process during the run."""
        return self.steps * self.batch * self.sequence

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return round(self.warmup * self.steps) if self.warmup <= 1.0 else round(self.warmup)

    @property
    def _schedule_options(self) -> dict[str, Any]:
        return {"kind": self.schedule, "warmup": self.warmup_steps, "final": self.final, "decay_fraction": self.decay}

    def rate(self, step: int) -> float:
        """The learning rate at `step`, as a fraction of the peak."""
        return schedule.multiplier(step, total=self.steps, **self._schedule_options)

    @property
    def branch_step(self) -> int:
        """The step at which the decay of a wsd schedule begins: up to there a run does not depend on its budget."""
        return schedule.decay_start(total=self.steps, kind=self.schedule, decay_fraction=self.decay)

    def branch(self, budget: int) -> Self:
        """The configuration of the run with a smaller budget that branches off this one."""
        return dataclasses.replace(self, **{self.budget: budget}, branches=())

    @property
    def branch_steps(self) -> set[int]:
        """The steps at which the branches of this run begin to decay."""
        return {self.branch(budget).branch_step for budget in self.branches}

    def for_data(self, data: Any) -> Self:
        """The same configuration with the vocabulary size or the number of classes of the data."""
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
        free = not_decisive(self.trouble)
        known = {name: value for name, value in (known | known.pop("model")).items() if name not in free}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Default name of the run's folder: scheme, learning rate, seed and hash."""
        scheme = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.model.scheme_object.label).strip("-")
        return f"{scheme}-lr{self.lr:g}-seed{self.seed}-{self.identity}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `TrainConfig.from_dict` reads them back."""
        fields = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        written = {
            field.name: value
            for field, value in fields.items()
            if not (field.name in LEFT_OUT and value == field.default)
        }
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}
        return plain | {"model": self.model.to_dict(), "clip": None if math.isinf(self.clip) else self.clip}

    def shared_dict(self) -> dict[str, Any]:
        """The same without paths of this machine: a scheme in a file is named by its content, not by its folder."""
        return self.to_dict() | {"model": self.model.to_dict() | {"scheme": self.model.scheme_object.shared_text}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` wrote, of the task that it names."""
        kind = config_class(values.get("task", DEFAULT_TASK))
        known = field_names(kind)
        for name in values:
            if name not in known:
                raise unknown("field of a run", name, known)
        given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        if given.get("clip", 1.0) is None:
            given["clip"] = math.inf
        given["model"] = kind.model_class(**values.get("model", {}))
        return kind(**given)

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Self:
        """A run with a model of a named size; `changes` are fields of the model and of the run."""
        kind = config_class(changes.get("task", DEFAULT_TASK)) if cls is TrainConfig else cls
        of_model = field_names(kind.model_class)
        inner = {name: value for name, value in changes.items() if name in of_model}
        outer = {name: value for name, value in changes.items() if name not in of_model}
        model = kind.model_class.preset(size, **inner)
        return cast(Self, kind(**(kind.preset_fields(size) | outer), model=model))

    @classmethod
    def preset_fields(cls, size: str) -> dict[str, Any]:
        """Fields of the run that go with a named size of the model."""
        return {}


LATER_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig) if field.name in ADDED_LATER}
"""Values of the fields that a run of version 0.1 does not have."""


def config_class(task: str) -> type[TrainConfig]:
    """The configuration class of a task."""
    # The modules of the tasks import this one.
    from normlab.train.tasks import find_task

    return find_task(task).config


def check_seed(seed: int) -> None:
    """Raise for a number that torch's generators do not take, and for a negative one: elsewhere -1 draws a seed."""
    if not 0 <= seed < 2**64:
        raise NormLabError(f"seed must lie in [0, 2**64), got {seed}; try 0")


def _refuse_fields_of_other_tasks(config: type[TrainConfig], names: Iterable[str]) -> None:
    from normlab.train.tasks import TASKS

    for name in set(names) - field_names(config):
        owners = [task.name for task in TASKS.values() if name in field_names(task.config)]
        if owners:
            raise NormLabError(f"task {config.task} has no {name}; leave it out, or try task {' or '.join(owners)}")


def _task_of(model: TransformerConfig) -> str:
    from normlab.train.tasks import TASKS

    return next((task.name for task in TASKS.values() if task.config.model_class is type(model)), DEFAULT_TASK)
