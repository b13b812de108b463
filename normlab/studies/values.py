"""Look up numbers of a row by path: "value", "profiles.-1.hidden_rms.max", "result.verdicts.vanishing.value".

Parts of a path are names, positions in a list (negative from its end), or, in a list of tables, the name, observable
or subject of one; * is every entry of a list ("profiles.*.hidden_rms.-1"). The last part may reduce a list: min, max,
mean, evenness (smallest over largest), growth, the slope of log y over log k, k = 1 on, or late_growth, the same from
the middle on. block_min, block_max, block_mean and block_evenness leave the first entry out: in a profile it is the
input of the first block. A list with a missing entry has no such number: what is not finite is stored as null, and a
state that overflowed is not bounded. Only the first entry may be missing: no block comes before it. "A / B" is the
ratio of two single numbers of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normlab.errors import NormLabError

_EACH = "*"
_BLOCKS = "block_"
_KEYS = ("name", "observable", "scheme", "subject")
"""Fields that identify a table in a list."""


def row_numbers(row: Mapping[str, Any], path: str) -> list[float]:
    """The numbers at a path: one, or all of a list; empty if missing or not finite."""
    return _finite(row_values(row, path))


def row_values(row: Mapping[str, Any], path: str) -> list[float | None]:
    """The same with None in the place of what is missing or not finite."""
    if " / " in path:
        over, under = (row_number(row, part) for part in path.split(" / ", 1))
        return [None if over is None or not under else _number(over / under)]
    parts = path.split(".")
    found = _every(row, parts) if _EACH in parts else _walk(row, parts)
    return [_number(value) for value in (found if isinstance(found, list | tuple) else [found])]


def row_number(row: Mapping[str, Any], path: str) -> float | None:
    """The single number at a path; None if it is missing or not finite."""
    found = row_numbers(row, path)
    if len(found) > 1:
        raise NormLabError(f"{path} is a list of {len(found)}; name a place in it, or end in {', '.join(_REDUCE)}")
    return found[0] if found else None


def _walk(found: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        found = _step(found, part)
    return found


def _every(row: Mapping[str, Any], parts: list[str]) -> Any:
    """What every entry of a list has; a reduction at the end of the path is that of all of them together."""
    place = parts.index(_EACH)
    inner, last = parts[place + 1 :], parts[-1] if parts[-1] in _REDUCE else None
    entries = _walk(row, parts[:place])
    found = [_walk(entry, inner[:-1] if last else inner) for entry in (entries if isinstance(entries, list) else [])]
    are_lists = all(isinstance(one, list) for one in found)
    if last and last.startswith(_BLOCKS) and not are_lists:
        raise NormLabError(
            f"{'.'.join(parts)}: {last} leaves out the first place of a profile; name no place before it"
        )
    series = found if are_lists else [found]
    return _reduced(last, series) if last else [value for one in series for value in one]


def _step(found: Any, part: str) -> Any:
    if isinstance(found, Mapping):
        return found.get(part)
    if not isinstance(found, list | tuple):
        return None
    if part.lstrip("-").isdecimal():
        place = int(part)
        return found[place] if -len(found) <= place < len(found) else None
    if part in _REDUCE:
        return _reduced(part, [found])
    return next((entry for entry in found if isinstance(entry, Mapping) and part in _names(entry)), None)


def _names(entry: Mapping[str, Any]) -> list[Any]:
    return [entry.get(key) for key in _KEYS] + [f"{entry.get('subject')}: {entry.get('quantity')}"]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _reduced(name: str, series: Sequence[Sequence[Any]]) -> float | None:
    """One number of all series together; None if any of them lacks an entry other than its first."""
    known = [[_number(value) for value in one] for one in series]
    if any(value is None for one in known for value in one[1:]):
        return None
    values = [value for one in known for value in (one[1:] if name.startswith(_BLOCKS) else one)]
    return _REDUCE[name](values) if _finite(values) else None


def _growth(values: Sequence[float | None], first: int = 1) -> float | None:
    """Exponent p of y ~ k^p by least squares, from the second entry on: the first is the input of the first block."""
    placed = [(k, y) for k, y in enumerate(values) if k >= first and y is not None]
    if len(placed) < 2 or any(y <= 0.0 for _, y in placed):
        return None
    points = [(math.log(k), math.log(y)) for k, y in placed]
    mean_x, mean_y = (math.fsum(column) / len(points) for column in zip(*points, strict=True))
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
    return slope / math.fsum((x - mean_x) ** 2 for x, _ in points)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _evenness(values: Sequence[float]) -> float | None:
    return min(values) / max(values) if max(values) > 0.0 else None


_REDUCE: dict[str, Callable[[list[float | None]], float | None]] = {
    "min": lambda values: min(_finite(values)),
    "max": lambda values: max(_finite(values)),
    "mean": lambda values: _mean(_finite(values)),
    "evenness": lambda values: _evenness(_finite(values)),
    "growth": _growth,
    "late_growth": lambda values: _growth(values, max(1, len(values) // 2)),
}
_REDUCE |= {f"{_BLOCKS}{name}": _REDUCE[name] for name in ("min", "max", "mean", "evenness")}
