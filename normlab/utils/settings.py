"""Read and check TOML configuration files; errors name the file and the key."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from normlab.errors import NormLabError, unknown
from normlab.utils.records import from_plain, is_union

COUNTS = ("tokens", "eval_tokens", "images")
"""Settings that accept short counts: 33M."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_NOT_SETTINGS = ("model", "base", "continued")
"""Fields that are not settings: nested configurations, and what a run records about itself."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file; tables are flattened, so a setting has the same name in any table."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NormLabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NormLabError(f"{path} is no TOML: {error}") from None
    flat = {}
    for name, value in found.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def check_settings(
    settings: Mapping[str, Any], path: Path, configs: Iterable[type], options: Mapping[str, Any]
) -> None:
    """Raise for a key that is neither a field of `configs` nor in `options` (name → type), and for a wrong type."""
    kinds = {name: kind for config in configs for name, kind in get_type_hints(config).items()} | dict(options)
    known = {name: kind for name, kind in kinds.items() if name not in _NOT_SETTINGS}
    for name, value in settings.items():
        field = name.replace("-", "_")
        if field not in known:
            raise unknown(f"setting in {path.name}", name, known)
        _check_value(known[field], field, value, f"{path.name}: {name}")


def field_names(*configs: type) -> set[str]:
    """Names of all fields of some dataclasses."""
    return {field.name for config in configs for field in dataclasses.fields(config)}


def _check_value(kind: Any, field: str, value: Any, where: str) -> None:
    if field in COUNTS and not isinstance(value, bool | dict | list):
        with _placed(where):
            count(str(value))
    elif isinstance(value, list) or get_origin(kind) is not tuple:
        from_plain(kind, _as_typed(kind, value), where)
    else:
        # One value where a list is allowed.
        from_plain(kind, [_as_typed(get_args(kind)[0], value)], where)


def _as_typed(kind: Any, value: Any) -> Any:
    """Convert text to a number or a path, as the command line does."""
    kinds = get_args(kind) if is_union(kind) else (kind,)
    if not isinstance(value, str):
        return value
    for one in kinds:
        if one in (int, float, Path):
            try:
                return one(value)
            except ValueError:
                continue
    return value


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Context manager that prefixes errors with `where`."""
    try:
        yield
    except NormLabError as error:
        raise NormLabError(f"{where}: {error}") from None


@contextmanager
def blamed(file: str | None, typed: Sequence[str]) -> Iterator[None]:
    """Context manager: errors about a setting name the file `file`, unless the setting was `typed` as a flag, too."""
    try:
        yield
    except NormLabError as error:
        names = {} if file is None else read_settings(Path(file))
        flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in typed}
        guilty = [name for name in names if re.search(rf"\b{name.replace('-', '_')}\b", str(error))]
        if any(name.replace("-", "_") not in flags for name in guilty):
            raise NormLabError(f"{Path(file or '').name}: {error}") from None
        raise


def count(text: str) -> int:
    """Parse a count: 200000, 200k, 33M, 1.5B, 3e7."""
    match = re.fullmatch(r"([\d_.]+(?:[eE]\+?\d+)?)([kmbgKMBG]?)", text)
    try:
        value = float(match[1]) * _UNITS[match[2].lower()] if match else None
    except ValueError:
        value = None
    if value is None or not value.is_integer():
        raise NormLabError(f"{text!r} is not a count; expected a whole number, e.g. 200000, 33M or 1.5B")
    return int(value)
