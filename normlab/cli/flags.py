"""What stands behind a flag: presets and TOML files become flags of their own, and counts may be written short.

Everything is done on the command line's words, before they are parsed, so that one parser checks all there is to check:
a preset comes first, then the file, then what the user typed, and the last one wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from normlab.errors import NormLabError, unknown
from normlab.train.config import DEFAULT_TASK, TrainConfig
from normlab.train.tasks import TASKS, Task, find_task
from normlab.utils.settings import COUNTS, blamed, check_settings, count, field_names, read_settings

_COUNTS = tuple(f"--{name.replace('_', '-')}" for name in COUNTS)


def expand(
    words: Sequence[str], configs: Sequence[type], options: Mapping[str, Any], default_task: str = DEFAULT_TASK
) -> tuple[list[str], Task]:
    """`words` after a verb, with `--preset` and `--toml` spelled out, and the task that they name.

    A file may set the fields of `configs` and of the task's model, and the verb's own `options` (name → type).
    """
    words = list(words)
    file = value_of(words, "--toml")
    settings = {} if file is None else read_settings(Path(file))
    with blamed(file, words):
        task = find_task(value_of(words, "--task") or str(settings.get("task", default_task)))
        if file is not None:
            check_settings(settings, Path(file), (*configs, task.model), {"preset": str | None, **options})
            settings = _spelled(settings, (*configs, task.model))
        _refuse_single(words, settings, configs)
        _refuse_foreign(words, task, field_names(*configs) - {*TrainConfig.foreign_fields(task.name)})
        preset = _preset_words(value_of(words, "--preset") or settings.pop("preset", None), task)
    return [*_count_words([*preset, *_words(settings), *words])], task


def _refuse_single(words: Sequence[str], settings: Mapping[str, Any], configs: Sequence[type]) -> None:
    """Raise for what is one value of a run and several of a comparison, which would otherwise go unheard."""
    several = {name: all_ for config in configs for name, all_ in getattr(config, "several", {}).items()}
    for name, all_ in several.items():
        if name in settings or value_of(words, f"--{name}") is not None:
            raise NormLabError(f"a comparison has no {name} of its own; name --{all_}")


def _refuse_foreign(words: Sequence[str], task: Task, of_run: set[str]) -> None:
    """Raise for a flag that only other tasks have."""
    known = of_run | field_names(task.model)
    for word in words:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        owners = [other.name for other in TASKS.values() if name in (*other.fields, *field_names(other.model))]
        if word.startswith("--") and name not in known and owners:
            raise NormLabError(
                f"task {task.name} has no {name.replace('_', '-')}; leave it out, or try --task {' or '.join(owners)}"
            )


def typed(config: type, task: Task, hidden: Iterable[str] = (), stored: TrainConfig | None = None) -> type:
    """A run's configuration, or one that holds it as `base`, as the command line shows it for a task.

    The model's fields and the defaults are those of the task, or of the run `stored`. Fields that the task does not
    have are left out of the help, and so are `hidden` ones: those of a run that a comparison has several of.
    """
    if config is not TrainConfig:
        return _variant(config, (), {}, {"base": typed(TrainConfig, task, getattr(config, "several", ()))})
    values = {"task": task.name, "data": task.data, "val_fraction": task.val_fraction, **_values(stored)}
    model = _variant(task.model, hidden, _values(stored and stored.model))
    unseen = [*TrainConfig.foreign_fields(task.name), *hidden, "continued"]
    values["model"] = dataclasses.field(default_factory=model)
    return _variant(config, unseen, values, {"model": model})


def _values(config: Any) -> dict[str, Any]:
    """The fields of a configuration as the command line knows them: flat, schemes as text."""
    fields = [] if config is None else [field.name for field in dataclasses.fields(config) if field.name != "model"]
    return {name: str(getattr(config, name)) if name == "scheme" else getattr(config, name) for name in fields}


def _variant(config: type, hidden: Iterable[str], values: Mapping[str, Any], kinds: Mapping[str, Any] = {}) -> type:
    """A configuration with other defaults and types; `hidden` fields, where it has them, are left out of the help."""
    known = {**get_type_hints(config), **kinds}
    unseen = {name: tyro.conf.Suppress[known[name]] for name in hidden if name in known}
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name in unseen}
    annotations = {name: known[name] for name in (*kinds, *values)} | unseen
    body = {"__annotations__": annotations, "__doc__": config.__doc__, "variant_of": config, **defaults, **values}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type(config.__name__, (config,), body))


def untyped(value: Any) -> Any:
    """What was parsed, as the class that the rest of the program knows: it can be sent to another process."""
    kind = vars(type(value)).get("variant_of") if dataclasses.is_dataclass(value) else None
    if kind is None:
        return value
    return kind(**{field.name: untyped(getattr(value, field.name)) for field in dataclasses.fields(kind)})


def value_of(words: Sequence[str], flag: str) -> str | None:
    """The value that a flag was given on the command line."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _preset_words(name: str | None, task: Task) -> list[str]:
    if name is None:
        return []
    presets = task.model.presets
    if name not in presets:
        raise unknown("preset", name, presets)
    return _words({**presets[name], **task.of_preset(presets[name])})


def _spelled(settings: Mapping[str, Any], configs: Iterable[type]) -> dict[str, Any]:
    """Yes and no as words, where the flag takes a value: one that knows a third answer is no switch."""
    kinds = {name: kind for config in configs for name, kind in get_type_hints(config).items()}
    switches = {name for name in settings if kinds.get(name.replace("-", "_")) is bool}
    return {
        name: str(value) if isinstance(value, bool) and name not in switches else value
        for name, value in settings.items()
    }


def _words(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def _count_words(words: Sequence[str]) -> Iterable[str]:
    """33M and 1.5e9 as whole numbers, where a count is expected."""
    before = ""
    for word in words:
        flag, sign, value = word.partition("=")
        if sign and flag in _COUNTS:
            yield f"{flag}={count(value)}"
        else:
            yield str(count(word)) if before in _COUNTS else word
        before = word
