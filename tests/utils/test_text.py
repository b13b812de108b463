"""Counts of things in words."""

from __future__ import annotations

from normlab.utils.text import counted


def test_one_thing_is_one_and_none_are_many():
    assert [counted(number, "seed") for number in (0, 1, 2)] == ["0 seeds", "one seed", "2 seeds"]
