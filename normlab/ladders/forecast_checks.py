"""Whether the rows of the held-out size followed their forecast, and what a reader must know about forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.ladders.fitted_rows import changes_since
from normlab.ladders.forecast import FILE, StoredForecast, file_name
from normlab.ladders.rows import LadderRow
from normlab.pages.numbers import join_names, minus


def refuse_lost_forecast(rows: Sequence[Mapping[str, Any]], forecasts: Sequence[StoredForecast], folder: Path) -> None:
    """Raise if stored rows carry the hash of a forecast that is not there: another one would come after its results."""
    known = {one.hash for one in forecasts}
    lost = next((row["forecast"] for row in rows if row.get("forecast") and row["forecast"] not in known), None)
    if lost is not None:
        path = folder / file_name(len(forecasts) + 1)
        raise NormLabError(f"{path} is missing, but rows were run after the forecast {lost}; restore it")


def check_rows_follow(
    rows: Sequence[LadderRow], forecasts: Sequence[StoredForecast], path: Path, held_out: str | None = None
) -> None:
    """Raise if a row of the held-out size has no forecast, began before it, or carries another one's hash."""
    for row in rows:
        if row.size == (forecasts[0].size if forecasts else held_out):
            _check_row(row, forecasts, path)


def _check_row(row: LadderRow, forecasts: Sequence[StoredForecast], path: Path) -> None:
    name = f"{row.scheme}, {row.size}, {row.tokens:,} tokens, seed {row.seed}"
    if not forecasts:
        raise NormLabError(f"{path}: the row of {name} has no {FILE} that it was forecast in; restore that file")
    own = [one for one in forecasts if row.scheme in one.covered] or forecasts
    carried = next((one for one in own if one.hash == row.forecast), None)
    if carried is None:
        raise NormLabError(
            f"{path}: the row of {name} carries the hash {row.forecast}, not that of its forecast "
            f"({own[-1].hash}); restore that file or remove the row"
        )
    if row.started is not None and _moment(row.started, path) < _moment(carried.written, path):
        raise NormLabError(f"{path}: {name} began before the forecast was written; remove the row")


def _moment(text: str, path: Path) -> datetime:
    """Parse a date and time in ISO format; without an offset it is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise NormLabError(
            f"{path}: {text!r} is not a date and time in ISO format, e.g. 2026-01-02T12:00:00+00:00; restore the file"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def forecast_cautions(forecasts: Sequence[StoredForecast], rows: Sequence[LadderRow]) -> list[str]:
    """Schemes without a forecast and why, and rows that are no longer those that a forecast was made from."""
    missing = [line for one in forecasts for line in missing_forecasts(one)]
    return [*missing, *_trained_without(forecasts, rows), *_changed(forecasts, rows)]


def missing_forecasts(forecast: StoredForecast) -> list[str]:
    """What a forecast does not say and why: a line for each reason."""
    alike: dict[str, list[str]] = {}
    for scheme, why in forecast.without.items():
        alike.setdefault(why, []).append(scheme)
    if forecast.reason and not alike:
        return [f"No forecast of {forecast.size} could be made: {minus(forecast.reason)}."]
    return [
        f"{join_names(names)} {'has' if len(names) == 1 else 'have'} no forecast of {forecast.size}: {minus(why)}."
        for why, names in alike.items()
    ]


def _trained_without(forecasts: Sequence[StoredForecast], rows: Sequence[LadderRow]) -> Iterator[str]:
    """Schemes whose rows carry the hash of a forecast that does not have them: older versions trained them so."""
    for one in forecasts:
        told = {one.baseline, *(cell.scheme for cell in one.cells), *one.without}
        carry = dict.fromkeys(row.scheme for row in rows if row.size == one.size and row.forecast == one.hash)
        names = [scheme for scheme in carry if scheme not in told]
        if names and not one.reason:
            were = "was" if len(names) == 1 else "were"
            what = f"trained at {one.size} without a forecast: that of {one.written[:10]}"
            yield f"{join_names(names)} {were} {what} has none of {'it' if were == 'was' else 'them'}."


def _changed(forecasts: Sequence[StoredForecast], rows: Sequence[LadderRow]) -> Iterator[str]:
    for one in forecasts:
        if told := changes_since(one, rows):
            yield f"The rows that the forecast of {one.written[:10]} was made from have changed since: {told}."
