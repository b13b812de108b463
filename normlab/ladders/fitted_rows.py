"""The rows that a forecast was made from: their hash, their losses by name, and what has changed in them since."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from normlab.ladders.forecast import StoredForecast
from normlab.ladders.rows import LadderRow
from normlab.utils.text import counted


def hash_of_rows(rows: Sequence[LadderRow]) -> str:
    """Hash of the losses that a forecast is made from; their order does not matter."""
    lines = sorted(f"{row.scheme} {row.size} {row.tokens} {row.seed} {row.state} {row.loss!r}" for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def losses_by_name(rows: Sequence[LadderRow]) -> dict[str, float | None]:
    """The losses of rows; None where a row enters no fit."""
    return {_name(row): row.loss if row.is_usable else None for row in rows}


def changes_since(forecast: StoredForecast, rows: Sequence[LadderRow]) -> str:
    """What differs between the rows that a forecast was made from and those of today, in words; empty: nothing."""
    now = [row for row in rows if row.size != forecast.size]
    # A scheme that was added since has no part in the forecast.
    own = [row for row in now if _was_there(forecast, row.scheme)]
    if forecast.made_from in (hash_of_rows(now), hash_of_rows(own)):
        return ""
    if forecast.losses is None:
        return f"they are not the same any more ({forecast.rows} rows then, {len(now)} now)"
    before, after = forecast.losses, losses_by_name(own)
    numbers = {
        "changed": sum(after[name] != before[name] for name in before.keys() & after),
        "added": len(after.keys() - before),
        "gone": len(before.keys() - after),
    }
    return ", ".join(f"{counted(number, 'row')} {what}" for what, number in numbers.items() if number)


def _was_there(forecast: StoredForecast, scheme: str) -> bool:
    if forecast.losses is None:
        return scheme in forecast.covered
    return any(name.startswith(_prefix(scheme)) for name in forecast.losses)


def _name(row: LadderRow) -> str:
    return f"{_prefix(row.scheme)}{row.size}, {row.tokens} tokens, seed {row.seed}"


def _prefix(scheme: str) -> str:
    return f"{scheme} at "
