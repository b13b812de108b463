"""The stored forecast: written once, sealed by its hash, and checked against the rows that came after it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.ladders.fitted_rows import changes_since, hash_of_rows, losses_by_name
from normlab.ladders.forecast import StoredForecast, hash_by_scheme, read_forecasts, write_forecast
from normlab.ladders.forecast_checks import check_rows_follow, forecast_cautions, refuse_lost_forecast
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import CellForecast, Interval, Place

WRITTEN = "2026-01-02T00:00:00+00:00"


def made(**changes: object) -> StoredForecast:
    place = Place(name="2x16, 1M tokens", size="2x16", parameters=10_000, tokens=1_000_000, flops=6e10, steps=10)
    gap = Interval(low=-0.02, high=0.01, mean=-0.005, level=0.95)
    cell = CellForecast(scheme="peri", place=place, seeds=2, gap=gap, simple_law=gap)
    known = {
        "written": WRITTEN, "commit": None, "versions": {"torch": "2.13"}, "baseline": "pre", "level": 0.95,
        "size": "2x16", "made_from": "0123", "rows": 8, "cells": [cell],
    }  # fmt: skip
    return StoredForecast(**(known | changes)).signed()  # type: ignore[arg-type]


def row(**changes: object) -> LadderRow:
    known = {
        "scheme": "peri", "size": "2x16", "parameters": 10_000, "tokens": 1_000_000, "flops": 6e10, "seed": 0,
        "loss": 3.0, "started": "2026-01-03T00:00:00+00:00", "forecast": made().hash,
    }  # fmt: skip
    return LadderRow(**(known | changes))  # type: ignore[arg-type]


def test_a_forecast_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_forecasts(tmp_path) == []
    assert write_forecast(tmp_path, made()).name == "forecast.json"
    assert read_forecasts(tmp_path) == [made()]


def test_a_forecast_is_never_written_twice(tmp_path: Path) -> None:
    write_forecast(tmp_path, made())
    with pytest.raises(NormLabError, match="never written twice"):
        write_forecast(tmp_path, made(written="2026-01-05T00:00:00+00:00"))


def test_a_scheme_that_was_added_later_has_a_forecast_of_its_own(tmp_path: Path) -> None:
    later = made(schemes=["geonorm"], written="2026-01-05T00:00:00+00:00")
    write_forecast(tmp_path, made())
    assert write_forecast(tmp_path, later).name == "forecast-2.json"
    assert read_forecasts(tmp_path) == [made(), later]
    assert hash_by_scheme([made(), later], []) == {"pre": made().hash, "peri": made().hash, "geonorm": later.hash}
    own = {"scheme": "geonorm", "started": "2026-01-06T00:00:00+00:00"}
    check_rows_follow([row(), row(**own, forecast=later.hash)], [made(), later], tmp_path)
    with pytest.raises(NormLabError, match="carries the hash"):
        check_rows_follow([row(**own)], [made(), later], tmp_path)
    with pytest.raises(NormLabError, match="began before the forecast"):
        check_rows_follow([row(scheme="geonorm", forecast=later.hash)], [made(), later], tmp_path)


def test_a_further_forecast_that_is_lost_is_named(tmp_path: Path) -> None:
    refuse_lost_forecast([{"forecast": made().hash}, {}], [made()], tmp_path)
    with pytest.raises(NormLabError, match=r"forecast-2\.json is missing, .* after the forecast another"):
        refuse_lost_forecast([{"forecast": "another"}], [made()], tmp_path)


def test_a_forecast_of_a_version_that_had_one_a_ladder_is_read(tmp_path: Path) -> None:
    """Written by version 0.2 on 2026-11-18: fields that came later are no part of its hash."""
    text = """{"written": "2026-11-18T14:37:21+00:00", "commit": "870b74856b85-dirty", "versions": {"normlab": "0.2.0",
    "torch": "2.13.0+cpu", "python": "3.11.7", "commit": "870b74856b85-dirty"}, "baseline": "pre", "level": 0.95,
    "size": "3x48", "made_from": "9e508c9a95e078cc", "rows": 8, "cells": [], "reason": null,
    "hash": "13de439c52db664f"}"""
    (tmp_path / "forecast.json").write_text(text)
    (found,) = read_forecasts(tmp_path)
    assert (found.schemes, found.covered) == ([], {"pre"})
    trained = [row(scheme="post", size="3x48", forecast=found.hash, started="2026-11-18T15:00:00+00:00")]
    check_rows_follow(trained, [found], tmp_path)
    told = forecast_cautions([found], trained)
    assert told[0] == "post was trained at 3x48 without a forecast: that of 2026-11-18 has none of it."
    # It was trained under that hash: a forecast of it now would come after its results.
    assert hash_by_scheme([found], [{"scheme": "post", "forecast": found.hash}])["post"] == found.hash


def test_a_forecast_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_forecast(tmp_path, made())
    path = tmp_path / "forecast.json"
    record = json.loads(path.read_text())
    record["cells"][0]["gap"]["low"] = -0.5
    path.write_text(json.dumps(record))
    with pytest.raises(NormLabError, match="changed after it was written"):
        read_forecasts(tmp_path)


def test_rows_after_the_forecast_pass(tmp_path: Path) -> None:
    check_rows_follow([row(), row(size="1x8", forecast=None, started="2026-01-01T00:00:00+00:00")], [made()], tmp_path)


def test_rows_before_the_forecast_or_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NormLabError, match="began before the forecast"):
        check_rows_follow([row(started="2026-01-01T23:59:59+00:00")], [made()], tmp_path)
    for other in (None, "another hash"):
        with pytest.raises(NormLabError, match="carries the hash"):
            check_rows_follow([row(forecast=other)], [made()], tmp_path)


def test_dates_are_compared_as_moments(tmp_path: Path) -> None:
    """14 hours east of Greenwich the clock was later when the forecast was written; the moment was before it."""
    check_rows_follow([row(started="2026-01-01T23:59:00-01:00")], [made()], tmp_path)
    with pytest.raises(NormLabError, match="began before the forecast"):
        check_rows_follow([row(started="2026-01-02T13:59:00+14:00")], [made()], tmp_path)
    with pytest.raises(NormLabError, match="'yesterday' is not a date"):
        check_rows_follow([row(started="yesterday")], [made()], tmp_path)


def test_schemes_without_a_forecast_are_listed_with_the_reason() -> None:
    why = "no cell at a smaller size counts (unreliable: seed 0 of post stuck)"
    told = forecast_cautions([made(without={"post": why, "mix": why, "keel": "it has no run at a smaller size"})], [])
    assert told[:2] == [
        f"post and mix have no forecast of 2x16: {why}.",
        "keel has no forecast of 2x16: it has no run at a smaller size.",
    ]


def test_rows_that_changed_since_the_forecast_are_counted() -> None:
    rows = [row(size="1x8", seed=seed) for seed in range(3)]
    own = made(made_from=hash_of_rows(rows), rows=3, losses=losses_by_name(rows))
    later = [row(), row(size="1x8", scheme="geonorm")]
    assert changes_since(own, [*rows, *later]) == ""
    other = [dataclasses.replace(rows[0], loss=2.9), *rows[1:2], row(size="1x8", seed=7), row(size="1x8", seed=8)]
    assert changes_since(own, [*other, *later]) == "one row changed, 2 rows added, one row gone"
    assert "2 rows added" in forecast_cautions([own], other)[-1]
    older = made(made_from=hash_of_rows(rows), rows=3)
    assert changes_since(older, rows) == ""
    assert "(3 rows then, 4 now)" in changes_since(older, other)


def test_the_hash_of_the_rows_depends_on_losses_and_not_on_their_order() -> None:
    rows = [row(seed=seed) for seed in range(3)]
    assert hash_of_rows(rows) == hash_of_rows(rows[::-1])
    assert hash_of_rows(rows) != hash_of_rows([*rows[:2], dataclasses.replace(rows[2], loss=3.0 + 1e-15)])
