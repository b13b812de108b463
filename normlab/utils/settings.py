"""Settings from TOML files, checked against types, with errors that name the file and the key."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from normlab.errors import NormLabError, unknown
from normlab.utils.counts import is_count, parse_count
from normlab.utils.records import from_plain, is_union


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a TOML file. Tables only group keys: `[model] depth = 2` and `depth = 2` are the same."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NormLabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NormLabError(f"{path} is not valid TOML: {error}; expected lines such as depth = 12") from None
    flat: dict[str, Any] = {}
    for name, value in found.items():
        table = value if isinstance(value, dict) else {name: value}
        twice = {one.replace("-", "_") for one in table} & {one.replace("-", "_") for one in flat}
        if twice:
            raise NormLabError(f"{path}: {min(twice)} is set twice; tables only group names, so leave one out")
        flat |= table
    return flat


def typed_settings(settings: Mapping[str, Any], path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as values of the types in `kinds` (name → type), by their names in Python.

    Raises for a key that is not in `kinds`, and for a value of another type.
    """
    found = {}
    for name, value in settings.items():
        field = name.replace("-", "_")
        if field not in kinds:
            raise unknown(f"setting in {path.name}", name, kinds)
        found[field] = _typed(kinds[field], value, f"{path.name}: {name}")
    return found


def field_names(*configs: type) -> set[str]:
    """The names of all fields of some dataclasses."""
    return {field.name for config in configs for field in dataclasses.fields(config)}


@contextmanager
def blame(path: Path | None, names: Collection[str]) -> Iterator[None]:
    """Put the name of the file `path` before errors that mention one of the settings `names` that it made."""
    try:
        yield
    except NormLabError as error:
        named = any(re.search(rf"\b{name.replace('-', '_')}\b", str(error)) for name in names)
        if path is None or path.name in str(error) or not named:
            raise
        raise NormLabError(f"{path.name}: {error}") from None


def _typed(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) is tuple and is_count(get_args(kind)[0]):
        return tuple(_typed(get_args(kind)[0], one, where) for one in (value if isinstance(value, list) else [value]))
    if is_count(kind):
        try:
            return parse_count(str(value))
        except NormLabError as error:
            raise NormLabError(f"{where}: {error}") from None
    if get_origin(kind) is tuple and not isinstance(value, list):
        # A single value where a list is expected.
        return from_plain(kind, [_parsed(get_args(kind)[0], value)], where)
    return from_plain(kind, _parsed(kind, value), where)


def _parsed(kind: Any, value: Any) -> Any:
    """Text converted to a number or a path, as the command line would; any other value unchanged."""
    if not isinstance(value, str):
        return value
    for one in get_args(kind) if is_union(kind) else (kind,):
        if one in (int, float, Path):
            try:
                return one(value)
            except ValueError:
                continue
    return value
