"""Settings that differ between runs that are compared, as where rows of several folders were put together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from normlab.pages.numbers import join_names
from normlab.train.config import LATER_DEFAULTS, not_decisive

_COMPARED = ("scheme", "lr", "seed", "model")
"""What runs of one comparison differ in."""
_LONGEST = 40
"""Characters of the values of a setting up to which they are shown."""

Values = dict[str, dict[str, Any]]
"""Values of every setting, by their JSON."""


def mixed_settings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Settings that differ between these rows, with their values, as "batch (4 and 8)"."""
    found = _values(rows)
    return [_told(name, found[name]) for name in found if len(found[name]) > 1]


def unequal_settings(groups: Collection[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Settings whose values differ between groups of rows, as the same; what differs within all alike is none."""
    each = [found for rows in groups if (found := _values(rows))]
    names = dict.fromkeys(name for found in each for name in found)
    unequal = [name for name in names if len({frozenset(found.get(name, {})) for found in each}) > 1]
    return [
        _told(name, {key: value for found in each for key, value in found.get(name, {}).items()}) for name in unequal
    ]


def mixed_cautions(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A caution if the rows of a comparison are of runs with different settings."""
    names = mixed_settings(rows)
    return [f"The rows have different settings: {join_names(names)}. What differs may be due to them."] if names else []


def _values(rows: Iterable[Mapping[str, Any]]) -> Values:
    found: Values = {}
    for row in rows:
        for name, value in _settings(row).items():
            found.setdefault(name, {})[json.dumps(value)] = value
    return found


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's result besides scheme, rate and seed; empty for a row that is no training run."""
    config = row.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("model"), Mapping):
        return {}
    # Version 0.1 lacked some fields.
    flat = {**LATER_DEFAULTS, **config, **config["model"]}
    free = (*_COMPARED, *not_decisive(str(flat.get("trouble"))))
    return {name: value for name, value in flat.items() if name not in free}


def _told(name: str, values: Mapping[str, Any]) -> str:
    shown = join_names(_text(value) for value in values.values())
    return f"{name} ({shown})" if len(shown) <= _LONGEST else name


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
