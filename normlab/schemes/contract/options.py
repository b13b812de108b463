"""Options of a scheme: type checks, and angles written as multiples of π ("pi/8", "π/4", "3*pi/8")."""

from __future__ import annotations

import functools
import math
import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """Raise for an option whose value is of the wrong type, not among its choices, or not finite."""
    hints = _type_hints(type(scheme))
    for name, option in scheme.options().items():
        value, hint = getattr(scheme, name), hints[name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            expected = f"one of {', '.join(map(repr, get_args(hint)))}"
        elif not _fits(value, hint):
            expected = _expected(hint)
        elif not _is_finite(value) and value != option.default:
            expected = "finite"
        else:
            continue
        raise NormLabError(f"{scheme.name}: {name} must be {expected}, got {value!r}; {advice_for(scheme, name)}")


_CHECKED = {
    float: "a number (angles may be written pi/8)",
    int: "of type int",
    bool: "of type bool",
    str: "text",
    NoneType: "None",
}
"""Types whose values are checked, and what an error calls them. Other types of a user's scheme are its own matter."""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an option's type, or of one of its types; types that are not checked fit every value."""
    return any(kind not in _CHECKED or _is(value, kind) for kind in _kinds(hint))


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) if kind is str else type(value) is kind


def _expected(hint: Any) -> str:
    return " or ".join(_CHECKED[kind] for kind in _kinds(hint))


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, float | int) or math.isfinite(value)
    except OverflowError:
        # A whole number beyond the floats.
        return False
