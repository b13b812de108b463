"""Convert a study's settings to a CompareConfig; names are those of the command line.

A study's settings are a comparison's, so whatever `normlab compare` understands (rates that are searched for, schemes
from a file) a study understands as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError, unknown
from normlab.train.config import DEFAULT_TASK, TrainConfig
from normlab.train.tasks import find_task
from normlab.utils.settings import count, field_names

_COUNTS = ("tokens", "eval_tokens", "images")
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


def comparison_config(settings: Mapping[str, Any], where: str) -> CompareConfig:
    """The comparison that the settings describe; `where` names them in errors."""
    task = find_task(str(settings.get("task", DEFAULT_TASK)))
    several, shared = field_names(CompareConfig) - {"base"}, field_names(TrainConfig) - {"model"}
    of_model = field_names(task.model) - {"scheme"}
    known = (several | shared | of_model | {"preset"}) - {*CompareConfig.several}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in CompareConfig.several:
            raise NormLabError(f"{where}: a comparison has no {name} of its own; name {CompareConfig.several[name]}")
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
        values[name] = _value(name, value, where)
    preset = values.pop("preset", None)
    outer = {name: value for name, value in values.items() if name in several}
    run = {name: value for name, value in values.items() if name in shared}
    inner = {name: value for name, value in values.items() if name in of_model - shared}
    try:
        base = TrainConfig(**run, model=task.model(**inner)) if preset is None else (
            TrainConfig.preset(str(preset), **run, **inner)
        )  # fmt: skip
        return CompareConfig(base=base, **outer)
    except TypeError as error:
        raise NormLabError(f"{where}: {error}") from None


def _value(name: str, value: Any, where: str) -> Any:
    """Lists as tuples, one value where several are meant, counts as numbers; another type is refused."""
    if name in _COUNTS and isinstance(value, str):
        return count(value)
    default = _DEFAULTS.get(name)
    if isinstance(value, list):
        return tuple(value)
    if (isinstance(default, tuple) or name == "lrs") and value != "auto":
        return (value,)
    kinds, expected = _KINDS.get(type(default), ((object,), ""))
    is_truth = isinstance(value, bool) and bool not in kinds and object not in kinds
    if is_truth or not isinstance(value, kinds):
        raise NormLabError(f"{where}: {name} must be {expected}, got {value!r}")
    return value


_DEFAULTS = {field.name: field.default for kind in (TrainConfig, CompareConfig) for field in dataclasses.fields(kind)}
