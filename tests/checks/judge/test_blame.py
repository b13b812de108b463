"""Which blocks stand out, and how they are named."""

from __future__ import annotations

import pytest

from normlab.checks.judge.blame import blocks, standing_out


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((5,), "block 5"),
        ((3, 17, 18, 19), "blocks 3, 17-19"),
        ((2, 1), "blocks 1-2"),
        (tuple(range(24)), "all blocks"),
        ((-1,), "the entry"),
        ((-1, 0), "the entry and block 0"),
        ((), ""),
    ],
)
def test_blocks_in_words(layers, words):
    assert blocks(layers, 24) == words


def test_standing_out():
    assert standing_out([1.0, 1.0, 5.0, 1.0, None]) == (2,)
    assert standing_out([1.0, 1.0, -5.0, 1.0], sign=-1.0) == (2,)
    assert standing_out([1.0, 1.0 + 1e-9, 1.0, 1.0]) == ()
    assert standing_out([None, None]) == ()
    # Median 0, median distance 1, so a standard deviation of 1.48: 3.5 of them are 5.19.
    assert standing_out([-1.0, -1.0, 0.0, 1.0, 5.1]) == ()
    assert standing_out([-1.0, -1.0, 0.0, 1.0, 5.3]) == (4,)
