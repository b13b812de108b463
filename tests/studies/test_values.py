"""Numbers of a row: places, reductions, and what was not finite."""

from __future__ import annotations

import math

import pytest

from normlab.errors import NormLabError
from normlab.studies.values import row_number, row_values

REDUCTIONS = ("min", "max", "mean", "evenness", "growth", "late_growth")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("series", [[1.0, 2.0, None, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, None], [1.0, 2.0, math.inf, 4.0]])
def test_a_state_that_overflowed_has_no_number(series, reduction):
    assert row_number({"rms": series}, f"rms.{reduction}") is None
    profiles = [{"rms": [1.0, 2.0, 3.0, 4.0, 5.0]}, {"rms": series}]
    assert row_number({"profiles": profiles}, f"profiles.*.rms.{reduction}") is None
    over_time = [{"rms": [1.0, value]} for value in series]
    assert row_number({"profiles": over_time}, f"profiles.*.rms.-1.{reduction}") is None


def test_a_series_of_blocks_begins_with_none():
    made = {"speed": [None, 1.0, 2.0, 3.0, 4.0, 5.0]}
    assert [row_number(made, f"speed.{name}") for name in ("min", "max", "mean")] == [1.0, 5.0, 3.0]
    assert row_number(made, "speed.evenness") == pytest.approx(0.2)
    profiles = {"profiles": [made, {"speed": [None, 7.0]}]}
    assert row_number(profiles, "profiles.*.speed.max") == 7.0
    assert row_number({"speed": [None]}, "speed.max") is None
    # Only the first place has no block before it.
    assert row_number({"speed": [None, None, 2.0]}, "speed.max") is None


def test_blocks_leave_out_the_input_of_the_first():
    row = {"profiles": [{"grad_norm": [8.0, 1.0, 2.0, 4.0]}]}
    found = {name: row_number(row, f"profiles.-1.grad_norm.{name}") for name in
             ("evenness", "block_evenness", "block_max", "block_min", "block_mean")}  # fmt: skip
    assert found == {"evenness": 0.125, "block_evenness": 0.25, "block_max": 4.0, "block_min": 1.0,
                     "block_mean": pytest.approx(7 / 3)}  # fmt: skip
    assert row_number({"x": [8.0]}, "x.block_max") is None
    with pytest.raises(NormLabError, match="leaves out the first place of a profile"):
        row_number(row, "profiles.*.grad_norm.-1.block_max")
    assert row_number(row, "profiles.*.grad_norm.block_max") == 4.0


def test_growth_counts_places_from_the_first_of_the_series():
    assert row_number({"speed": [None, 1.0, 2.0, 3.0, 4.0, 5.0]}, "speed.growth") == pytest.approx(1.0)
    # From place 3 of 6 on.
    assert row_number({"speed": [None, 9.0, 9.0, 9.0, 16.0, 25.0]}, "speed.late_growth") == pytest.approx(2.0)
    # Zero has no logarithm: an exponent of the other places would be one of another series.
    assert row_number({"rms": [1.0, 1.0, 0.0, 3.0, 4.0]}, "rms.growth") is None


def test_a_list_keeps_the_places_of_what_is_missing():
    assert row_values({"paired": [0.9, None, math.nan, 1.1]}, "paired") == [0.9, None, None, 1.1]
    assert row_values({}, "paired") == [None]
