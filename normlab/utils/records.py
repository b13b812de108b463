"""Serialisation of dataclasses to JSON and back, with type checks.

JSON has no NaN: a number that is not finite becomes null, and null is read as NaN if the field does not allow None.
Values are checked against the types of the fields, and an error names the field that is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from normlab.errors import NormLabError, unknown
from normlab.utils.files import save

T = TypeVar("T")


class StoredResult:
    """Base class of results stored as JSON: a dataclass with a field `schema`, the version of its format."""

    what: ClassVar[str]
    """Name of the result in errors."""
    made_by: ClassVar[str]
    """The command that writes it."""
    schema: Any

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned; raises for another schema."""
        found = record.get("schema") if isinstance(record, Mapping) else None
        if found != cls.schema:
            raise NormLabError(
                f"not a {cls.what} of schema {cls.schema} (found {found!r}); expected a file of {cls.made_by} --json"
            )
        return from_plain(cls, record, cls.what)

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` returned."""
        try:
            return cls.from_dict(json.loads(text))
        except ValueError as error:
            raise NormLabError(
                f"not a {cls.what}: torn, or not JSON ({error}); expected {cls.made_by} --json"
            ) from None

    def to_html(self) -> str:
        """The result as a self-contained HTML page."""
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Write the result atomically as `.json` or as an `.html` page."""
        return save(path, self.writers())

    def writers(self) -> dict[str, Callable[[], str]]:
        """Functions that return the text of a file, by suffix."""
        return {".json": self.to_json, ".html": self.to_html}


def to_plain(value: Any) -> Any:
    """Convert a dataclass, container or number to plain values for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: to_plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # Other values of a configuration (paths, dtypes) become text.
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """Read a value of type `kind` from plain values; `where` names it in errors."""
    return _read(kind, value, where)


@cache
def hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields, by name."""
    known = get_type_hints(kind)
    return {spec.name: known[spec.name] for spec in dataclasses.fields(kind)}


def is_union(kind: Any) -> bool:
    """Whether a type is a union, `X | Y` or `Union`."""
    return get_origin(kind) in (Union, types.UnionType)


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if is_union(kind):
        return _read_union(get_args(kind), value, where)
    if get_origin(kind) is Literal:
        return _expect(value in get_args(kind), value, f"one of {', '.join(map(repr, get_args(kind)))}", where)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where)
    if get_origin(kind) in (list, tuple, dict):
        return _read_many(kind, value, where)
    if kind is float:
        return math.nan if value is None else float(_expect(_is_number(value), value, "a number", where))
    # In Python bool is a subclass of int; here a bool is not accepted as an int.
    exact = type(value) is kind if kind in (int, bool) else isinstance(value, kind)
    return _expect(exact, value, f"of type {kind.__name__}", where)


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        try:
            return _read(kind, value, where)
        except NormLabError:
            continue
    return _read(last, value, where)


def _read_record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, Mapping), value, "an object", where)
    fields = hints(kind)
    for name in value:
        if name not in fields:
            raise unknown(f"field of {where}", str(name), fields)
    needed = [spec.name for spec in dataclasses.fields(kind) if _needed(spec)]
    missing = [name for name in needed if name not in value]
    if missing:
        raise NormLabError(f"{where} has no {missing[0]!r}; expected what NormLab wrote, unchanged")
    return kind(**{name: _read(fields[name], entry, f"{where}.{name}") for name, entry in value.items()})


def _needed(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def _read_many(kind: Any, value: Any, where: str) -> Any:
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is dict:
        _expect(isinstance(value, Mapping), value, "an object", where)
        return {name: _read(kinds[1], entry, f"{where}.{name}") for name, entry in value.items()}
    _expect(isinstance(value, list | tuple), value, "a list", where)
    if origin is tuple and kinds[-1] is not Ellipsis:
        _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}", where)
    else:
        kinds = (kinds[0],) * len(value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return origin(_read(of, entry, f"{where}[{place}]") for place, (of, entry) in pairs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expect(holds: bool, value: Any, wanted: str, where: str) -> Any:
    if not holds:
        shown = repr(value)
        raise NormLabError(f"{where} must be {wanted}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")
    return value
