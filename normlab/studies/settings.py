"""Convert a study's settings to the configuration of a comparison or a ladder; names are those of the command line.

Every option of `normlab compare` and `normlab ladder` (learning-rate search, schemes from files) is available in a
study.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError, unknown
from normlab.ladders.config import LadderConfig
from normlab.train.config import DEFAULT_TASK, config_class
from normlab.utils.counts import is_count, parse_count
from normlab.utils.settings import field_names

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


Experiment = TypeVar("Experiment", CompareConfig, LadderConfig)


def comparison_config(settings: Mapping[str, Any], where: str) -> CompareConfig:
    """The comparison with these settings; `where` is their location for error messages."""
    return _experiment_config(CompareConfig, "comparison", settings, where)


def ladder_config(settings: Mapping[str, Any], where: str) -> LadderConfig:
    """The ladder with these settings."""
    return _experiment_config(LadderConfig, "ladder", settings, where)


def _experiment_config(experiment: type[Experiment], title: str, settings: Mapping[str, Any], where: str) -> Experiment:
    kind = config_class(str(settings.get("task", DEFAULT_TASK)))
    several, shared = field_names(experiment) - {"base"}, field_names(kind) - {"model"}
    of_model = field_names(kind.model_class) - {"scheme"}
    known = (several | shared | of_model | {"preset"}) - {*experiment.several}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in experiment.several:
            raise NormLabError(f"{where}: a {title} has no {name} of its own; name {experiment.several[name]}")
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
        values[name] = _value(name, value, (kind, experiment, kind.model_class), where)
    preset = values.pop("preset", None)
    outer = {name: value for name, value in values.items() if name in several}
    run = {name: value for name, value in values.items() if name in shared}
    inner = {name: value for name, value in values.items() if name in of_model - shared}
    try:
        base = kind(**run, model=kind.model_class(**inner)) if preset is None else (
            kind.preset(str(preset), **run, **inner)
        )  # fmt: skip
        return experiment(base=base, **outer)
    except TypeError as error:
        raise NormLabError(f"{where}: {error}; check the types of its settings") from None


def _value(name: str, value: Any, kinds: tuple[type, ...], where: str) -> Any:
    """A setting as a Python value: lists as tuples, counts as numbers. Raises for a value of another type."""
    hint = next((found[name] for kind in kinds if name in (found := get_type_hints(kind, include_extras=True))), None)
    default = next((f.default for kind in kinds for f in fields(kind) if f.name == name), None)
    takes_list = isinstance(default, tuple) or name == "lrs"
    accepted, expected = _KINDS.get(type(default), ((object,), "a single value"))
    if isinstance(value, list):
        if not takes_list:
            raise NormLabError(f"{where}: {name} must be {expected}, got {value!r}{_advice(default)}")
        counts = any(is_count(entry) for entry in get_args(hint))
        return tuple(parse_count(entry) if counts and isinstance(entry, str) else entry for entry in value)
    if isinstance(value, str) and is_count(hint):
        return parse_count(value)
    if takes_list and value != "auto":
        return (value,)
    is_truth = isinstance(value, bool) and bool not in accepted and object not in accepted
    if is_truth or not isinstance(value, accepted):
        raise NormLabError(f"{where}: {name} must be {expected}, got {value!r}{_advice(default)}")
    return value


def _advice(default: Any) -> str:
    return "" if default is None else f"; try {default!r}"
