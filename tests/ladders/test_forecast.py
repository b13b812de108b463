"""The stored forecast: written once, sealed by its hash, and checked against the rows that came after it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.ladders.forecast import (
    StoredForecast,
    check_rows_follow,
    hash_of_rows,
    read_forecast,
    write_forecast,
)
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
    assert read_forecast(tmp_path) is None
    write_forecast(tmp_path, made())
    assert read_forecast(tmp_path) == made()


def test_a_forecast_is_never_written_twice(tmp_path: Path) -> None:
    write_forecast(tmp_path, made())
    with pytest.raises(NormLabError, match="never written twice"):
        write_forecast(tmp_path, made(written="2026-01-05T00:00:00+00:00"))


def test_a_forecast_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_forecast(tmp_path, made())
    path = tmp_path / "forecast.json"
    record = json.loads(path.read_text())
    record["cells"][0]["gap"]["low"] = -0.5
    path.write_text(json.dumps(record))
    with pytest.raises(NormLabError, match="changed after it was written"):
        read_forecast(tmp_path)


def test_rows_after_the_forecast_pass(tmp_path: Path) -> None:
    check_rows_follow([row(), row(size="1x8", forecast=None, started="2026-01-01T00:00:00+00:00")], made(), tmp_path)


def test_rows_before_the_forecast_or_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NormLabError, match="began before the forecast"):
        check_rows_follow([row(started="2026-01-01T23:59:59+00:00")], made(), tmp_path)
    for other in (None, "another hash"):
        with pytest.raises(NormLabError, match="carries the hash"):
            check_rows_follow([row(forecast=other)], made(), tmp_path)


def test_the_hash_of_the_rows_depends_on_losses_and_not_on_their_order() -> None:
    rows = [row(seed=seed) for seed in range(3)]
    assert hash_of_rows(rows) == hash_of_rows(rows[::-1])
    assert hash_of_rows(rows) != hash_of_rows([*rows[:2], dataclasses.replace(rows[2], loss=3.0 + 1e-15)])
