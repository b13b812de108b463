"""Options of a scheme: type checks, and angles written as multiples of π ("pi/8", "π/4", "3*pi/8")."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from normlab.errors import NormLabError, advice_for

if TYPE_CHECKING:
    from normlab.schemes.contract.scheme import Scheme

_ANGLE = re.compile(r"(?:(?P<times>\d+(?:\.\d+)?)\s*\*?\s*)?(?:pi|π)\s*(?:/\s*(?P<over>\d+(?:\.\d+)?))?", re.IGNORECASE)


def angle(text: str) -> float | None:
    """The value of a multiple of π given as text; None for any other text."""
    found = _ANGLE.fullmatch(text.strip())
    if found is None or (found["over"] and float(found["over"]) == 0.0):
        return None
    return float(found["times"] or 1) * math.pi / float(found["over"] or 1)


@functools.cache
def _type_hints(kind: type[Scheme]) -> dict[str, Any]:
    """Evaluated once for each class: annotations are text, and compiling them takes longer than all else here."""
    return get_type_hints(kind)


def read_angles(scheme: Scheme) -> None:
    """Replace angles given as text ("pi/8") by numbers, so that equal schemes have one text and one hash."""
    hints = _type_hints(type(scheme))
    for name in scheme.options():
        value = getattr(scheme, name)
        turn = angle(value) if hints[name] is float and isinstance(value, str) else None
        if turn is not None:
            object.__setattr__(scheme, name, turn)


def check_types(scheme: Scheme) -> None:
    """Raise for an option whose value is of the wrong type or not among its choices."""
    hints = _type_hints(type(scheme))
    for name in scheme.options():
        value, hint = getattr(scheme, name), hints[name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = ", ".join(map(repr, get_args(hint)))
            raise NormLabError(
                f"{scheme.name}: {name} must be one of {choices}, got {value!r}; {advice_for(scheme, name)}"
            )
        if hint is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise NormLabError(
                f"{scheme.name}: {name} must be a number (angles may be written pi/8), got {value!r}; "
                f"{advice_for(scheme, name)}"
            )
        if hint in (bool, int) and type(value) is not hint:
            raise NormLabError(
                f"{scheme.name}: {name} must be of type {hint.__name__}, got {value!r}; {advice_for(scheme, name)}"
            )
