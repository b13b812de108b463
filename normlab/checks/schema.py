"""JSON Schema (draft 2020-12) of what `normlab check --json` writes, generated from the records themselves."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal, get_args, get_origin

from normlab.checks.result import SCHEMA, Check
from normlab.utils.docstrings import field_docs
from normlab.utils.records import hints, is_union

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    # JSON has no NaN: a number that is not finite is null.
    float: {"type": ["number", "null"]},
    type(None): {"type": "null"},
}


def schema(record: type = Check) -> dict[str, Any]:
    """JSON Schema of a record class, by default of `Check`."""
    records = _Records()
    root = records.of(record)
    name = getattr(record, "what", record.__name__.lower())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"NormLab {name}, schema {getattr(record, 'schema', SCHEMA)}",
        **root,
        "$defs": dict(sorted(records.definitions.items())),
    }


class _Records:
    """Definitions of the record classes met so far; each is defined once and referenced."""

    def __init__(self) -> None:
        self.definitions: dict[str, dict[str, Any]] = {}
        self._names: dict[type, str] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """JSON Schema of a type."""
        if kind is Any:
            return {}
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if dataclasses.is_dataclass(kind):
            return {"$ref": f"#/$defs/{self._defined(kind)}"}
        if is_union(kind):
            return _union([self.of(part) for part in get_args(kind)])
        if get_origin(kind) is Literal:
            return {"enum": list(get_args(kind))}
        return _container(kind, [self.of(part) for part in get_args(kind) if part is not Ellipsis])

    def _defined(self, kind: Any) -> str:
        """Define a record class if it is new; returns its name."""
        if kind not in self._names:
            taken = kind.__name__ in self._names.values()
            # Two packages may use one word for different things.
            self._names[kind] = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}" if taken else kind.__name__
            self.definitions[self._names[kind]] = self._record(kind)
        return self._names[kind]

    def _record(self, kind: Any) -> dict[str, Any]:
        told = field_docs(kind)
        fields = {name: self.of(part) for name, part in hints(kind).items()}
        return {
            "type": "object",
            "description": inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
            "properties": {name: part | _description(told.get(name)) for name, part in fields.items()},
            "required": list(fields),
            "additionalProperties": False,
        }


def _description(words: str | None) -> dict[str, str]:
    return {"description": words} if words else {}


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A union: a list of plain types, or else `anyOf`."""
    if all(part.keys() == {"type"} for part in parts):
        names = [name for part in parts for name in _listed(part["type"])]
        return {"type": list(dict.fromkeys(names))}
    return {"anyOf": parts}


def _container(kind: Any, parts: list[dict[str, Any]]) -> dict[str, Any]:
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": parts[1]}
    if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    return {"type": "array", "items": parts[0]}


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names
