"""Counts of things, durations and sizes in words."""

from __future__ import annotations

import pytest

from normlab.utils.text import counted, duration, size


def test_one_thing_is_one_and_none_are_many():
    assert [counted(number, "seed") for number in (0, 1, 2)] == ["0 seeds", "one seed", "2 seeds"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.01, "1 s"), (89.4, "89 s"), (120, "2 min"), (5399, "90 min"), (9000, "2.5 h")]
)
def test_durations(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(("count", "said"), [(0, "0.0 MiB"), (3 * 2**19, "1.5 MiB"), (2**30, "1.0 GiB")])
def test_sizes(count, said):
    assert size(count) == said
