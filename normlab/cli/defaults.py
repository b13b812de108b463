"""Defaults of `normlab train`, `compare` and `ladder`: those of the task, then of a stored run, a preset, a TOML file.

They are put into a configuration that tyro gets as `default=`, so that flags come last. It is not checked: flags may
still change or complete it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError, unknown
from normlab.ladders.config import LadderConfig
from normlab.models.config import TransformerConfig
from normlab.train.config import DEFAULT_TASK, TrainConfig
from normlab.train.tasks import TASKS, Task, find_task
from normlab.utils.settings import blame, field_names, read_settings, typed_settings

Verb = Callable[..., Any]

Many = CompareConfig | LadderConfig
"""A configuration of many runs: its `base` is shared by all, and `several` names what differs between them."""

_NOT_SETTINGS = ("model", "base", "continued")
"""Fields that hold other configurations, and one that a run sets itself."""

_OF_ONE_RUN = ("branches",)
"""Fields of a run that a comparison does not have."""

_ELSEWHERE = {
    "depth": ("layers", "n_layers", "n_layer", "num_layers", "num_hidden_layers", "blocks"),
    "dim": ("width", "d_model", "n_embd", "hidden_size", "hidden_dim"),
    "heads": ("n_heads", "n_head", "num_heads", "num_attention_heads"),
    "lr": ("learning_rate", "max_lr"),
    "batch": ("batch_size", "bs"),
    "accumulate": ("gradient_accumulation_steps", "grad_accum"),
    "length": ("seq_len", "seq_length", "sequence_length", "block_size", "context", "context_length"),
    "tokens": ("steps", "max_steps", "iterations", "max_iters", "num_epochs"),
    "warmup": ("warmup_steps", "warmup_iters", "warmup_ratio"),
    "clip": ("grad_clip", "max_grad_norm", "clip_grad"),
    "toml": ("config", "config_file"),
    "optimiser": ("optimizer", "optim"),
    "out": ("output", "out_dir", "output_dir"),
}
"""What other programs call an option of ours, whose name is not near it."""


class Defaults:
    """The sources of the defaults of a command with a parameter `config`, found in the words typed after it."""

    def __init__(self, verb: Verb, words: Sequence[str]):
        self._verb, self._words = verb, list(words)
        file = value_of(words, "--toml")
        self._file = None if file is None else Path(file)
        self._settings = {} if self._file is None else read_settings(self._file)
        self._stored = _stored(self._folder("--resume")) or _branch(_stored(self._folder("--branch-from")))

    def _folder(self, flag: str) -> str | None:
        """The folder of a run that is named on the command line, else in the file."""
        named = next((value for name, value in self._settings.items() if f"--{name}".replace("_", "-") == flag), None)
        return value_of(self._words, flag) or (named if isinstance(named, str) and named else None)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Add the name of the TOML file to errors about its settings, unless a flag overrides the setting."""
        typed = {_field(word) for word in self._words}
        with blame(self._file, [name for name in self._settings if name.replace("-", "_") not in typed]):
            yield

    def verb(self) -> Verb:
        """The command with its defaults."""
        hints = get_type_hints(self._verb)
        options = {name: kind for name, kind in hints.items() if name not in ("config", "toml", "return")}
        task = self._task()
        configs = [task.config, task.config.model_class, *([] if self._many is None else [self._many])]
        known = field_names(*configs) | options.keys() | {"toml"}
        self._refuse_other_names(known)
        self._refuse_foreign(task, known)
        refuse_no_values({**_kinds(configs), **options}, self._words)
        settings = self._typed({**_kinds(configs), **options})
        given = {name: value for name, value in settings.items() if name in options}
        preset = value_of(self._words, "--preset") or given.get("preset")
        values = {**_values(self._stored), **_preset(preset, task), **settings}
        return partial(self._verb, config=self._config(task, values), **given)

    def registry(self) -> ConstructorRegistry:
        """Rules for tyro: a comparison has no options for a run's scheme, learning rate, seed and branches."""
        return _without(() if self._many is None else (*self._many.several, *_OF_ONE_RUN))

    @property
    def _many(self) -> type[Many] | None:
        """The configuration of many runs that the command takes; None for a single run."""
        kind = get_type_hints(self._verb)["config"]
        return kind if kind in get_args(Many) else None

    def _task(self) -> Task:
        stored = DEFAULT_TASK if self._stored is None else self._stored.task
        return find_task(value_of(self._words, "--task") or str(self._settings.get("task", stored)))

    @property
    def _named(self) -> list[str]:
        """The options that are given, on the command line and then in the file."""
        flags = [word for word in self._words if word.startswith("--")]
        return [*map(_field, flags), *(name.replace("-", "_") for name in self._settings)]

    def _refuse_other_names(self, known: Collection[str]) -> None:
        """Raise for an option under the name that it has in other programs."""
        ours = {other: name for name, others in _ELSEWHERE.items() for other in others}
        for name in self._named:
            if name not in known and ours.get(name) in known:
                several = {} if self._many is None else self._many.several
                near = several.get(ours[name], ours[name])
                raise NormLabError(f"unknown option {name!r}; did you mean --{near}?")

    def _refuse_foreign(self, task: Task, known: Collection[str]) -> None:
        """Raise for an option that only other tasks have, and for one that a comparison replaces by a list."""
        for name in self._named:
            what = "comparison" if self._many is CompareConfig else "ladder"
            if self._many is not None and name in self._many.several:
                raise NormLabError(f"a {what} has no {name} of its own; name --{self._many.several[name]}")
            if self._many is not None and name in _OF_ONE_RUN:
                raise NormLabError(f"a {what} has no {name}; they are an option of normlab train")
            owners = [one.name for one in TASKS.values() if name in field_names(one.config, one.config.model_class)]
            if owners and name not in known:
                raise NormLabError(
                    f"task {task.name} has no {name.replace('_', '-')}; leave it out, or try --task "
                    f"{' or '.join(owners)}"
                )

    def _typed(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        if self._file is None:
            return {}
        empty = next(
            (name for name, value in self._settings.items() if value == "" and _is_path(kinds.get(name))), None
        )
        if empty is not None:
            raise _empty_path(empty)
        return typed_settings(self._settings, self._file, kinds)

    def _config(self, task: Task, values: Mapping[str, Any]) -> TrainConfig | Many:
        model = _unchecked(task.config.model_class, values)
        run = _unchecked(task.config, {**values, "task": task.name, "model": model})
        return run if self._many is None else _unchecked(self._many, {**values, "base": run})


def refuse_empty_paths(verb: Verb, words: Sequence[str]) -> None:
    """Raise for a path that is empty text, as an unset shell variable leaves it: it would mean this folder."""
    paths = [name for name, kind in get_type_hints(verb).items() if _is_path(kind)]
    for name in paths:
        if value_of(words, f"--{name}") == "":
            raise _empty_path(name)
    parameters = inspect.signature(verb).parameters
    without_flag = any(parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in paths)
    if without_flag and any(word == "" and not before.startswith("-") for before, word in pairwise(words)):
        raise NormLabError(f'a path of {words[0]} is empty; name it, or write "." for this folder')


def refuse_no_values(kinds: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise for an option of one value or more that has none: its default would be taken without a word."""
    lists = {f"--{name.replace('_', '-')}" for name, kind in kinds.items() if _is_list(kind)}
    for word, following in pairwise([*words, "--"]):
        if (flag := word.replace("_", "-")) in lists and following.startswith("--"):
            raise NormLabError(f"{flag} is empty; expected one value or more; leave it out for its default")


def value_of(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag among words that are not parsed yet; the last one, where it is given twice.

    As for tyro, - and _ are the same in a flag.
    """
    value, flag = None, flag.replace("_", "-")
    for word, following in zip(words, [*words[1:], None], strict=False):
        name, joined, text = word.partition("=")
        if name.replace("_", "-") == flag:
            value = text if joined else following
    return value


def _stored(folder: str | None) -> TrainConfig | None:
    """The configuration of the run that is to be resumed or branched off."""
    if folder is None:
        return None
    from normlab.train.storage.folder import RunFolder

    return RunFolder(Path(folder)).config


def _branch(trunk: TrainConfig | None) -> TrainConfig | None:
    """The configuration of a branch before its budget is named."""
    return None if trunk is None else dataclasses.replace(trunk, branches=())


def _field(flag: str) -> str:
    """--no-zero-outputs=... → zero_outputs."""
    return flag.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def _kinds(configs: Sequence[type]) -> dict[str, Any]:
    """The types of all settings of some configurations."""
    hints = {name: kind for one in configs for name, kind in get_type_hints(one, include_extras=True).items()}
    return {name: hints[name] for name in field_names(*configs) if name not in _NOT_SETTINGS}


def _values(config: Any) -> dict[str, Any]:
    """The fields of a stored run and of its model, by name; the scheme as text."""
    if config is None:
        return {}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if "scheme" in fields:
        fields["scheme"] = str(fields["scheme"])
    return fields | _values(fields.get("model"))


def _preset(name: str | None, task: Task) -> Mapping[str, Any]:
    if name is None:
        return {}
    sizes = task.config.model_class.presets
    if name not in sizes:
        raise unknown("preset", name, sizes)
    return {**sizes[name], **task.config.preset_fields(name)}


def _unchecked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass with these values, without the checks of its constructor."""
    made = object.__new__(kind)
    made.__dict__.update({name: values[name] for name in field_names(kind) if name in values})
    return made


def _without(hidden: Collection[str]) -> ConstructorRegistry:
    """Rules for tyro under which the fields `hidden` of a run and its model have no flags."""
    registry, busy = ConstructorRegistry(), set()

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind = info.type
        if kind in busy or not (isinstance(kind, type) and issubclass(kind, TrainConfig | TransformerConfig)):
            return None
        # Asked again, the rule does not apply, and tyro's own for dataclasses does.
        busy.add(kind)
        spec = ConstructorRegistry.get_struct_spec(info)
        busy.remove(kind)
        assert isinstance(spec, StructConstructorSpec)
        return dataclasses.replace(spec, fields=tuple(one for one in spec.fields if one.name not in hidden))

    return registry


def _is_list(kind: Any) -> bool:
    """Whether an option takes any number of values; one of a type with a rule of its own says so itself."""
    return get_origin(kind) is tuple and get_args(kind)[1:] == (...,)


def _is_path(kind: Any) -> bool:
    return Path in (kind, *get_args(kind))


def _empty_path(name: str) -> NormLabError:
    flag = name.replace("_", "-")
    return NormLabError(f'--{flag} is empty; expected a path; leave it out for its default, or write "."')
