"""Convert a study's settings to a CompareConfig; names are those of the command line.

Every option of `normlab compare` (learning-rate search, schemes from files) is available in a study.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError, unknown
from normlab.train.config import DEFAULT_TASK, TrainConfig, config_class
from normlab.utils.counts import count, is_count
from normlab.utils.settings import field_names

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


def comparison_config(settings: Mapping[str, Any], where: str) -> CompareConfig:
    """The comparison with these settings; `where` is their location for error messages."""
    kind = config_class(str(settings.get("task", DEFAULT_TASK)))
    several, shared = field_names(CompareConfig) - {"base"}, field_names(kind) - {"model"}
    of_model = field_names(kind.model_class) - {"scheme"}
    known = (several | shared | of_model | {"preset"}) - {*CompareConfig.several}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in CompareConfig.several:
            raise NormLabError(f"{where}: a comparison has no {name} of its own; name {CompareConfig.several[name]}")
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
        values[name] = _value(name, value, kind, where)
    preset = values.pop("preset", None)
    outer = {name: value for name, value in values.items() if name in several}
    run = {name: value for name, value in values.items() if name in shared}
    inner = {name: value for name, value in values.items() if name in of_model - shared}
    try:
        base = kind(**run, model=kind.model_class(**inner)) if preset is None else (
            kind.preset(str(preset), **run, **inner)
        )  # fmt: skip
        return CompareConfig(base=base, **outer)
    except TypeError as error:
        raise NormLabError(f"{where}: {error}") from None


def _value(name: str, value: Any, config: type[TrainConfig], where: str) -> Any:
    """A setting as a Python value: lists as tuples, counts as numbers. Raises for a value of another type."""
    if isinstance(value, str) and is_count(get_type_hints(config, include_extras=True).get(name)):
        return count(value)
    default = next((f.default for kind in (config, CompareConfig) for f in fields(kind) if f.name == name), None)
    if isinstance(value, list):
        return tuple(value)
    if (isinstance(default, tuple) or name == "lrs") and value != "auto":
        return (value,)
    kinds, expected = _KINDS.get(type(default), ((object,), ""))
    is_truth = isinstance(value, bool) and bool not in kinds and object not in kinds
    if is_truth or not isinstance(value, kinds):
        raise NormLabError(f"{where}: {name} must be {expected}, got {value!r}")
    return value
