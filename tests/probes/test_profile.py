"""Profiles and ladders: JSON round trip, what is missing, what is not finite, derived numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from normlab.checks.ladder_records import Ladder
from normlab.errors import NormLabError
from normlab.probes.profile import BLOCK, BOUNDARY, LARGEST, SCALAR, Format, Profile

TYPES: dict[Format, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def test_json_round_trip_keeps_everything_even_what_is_not_finite():
    profile = Profile(
        boundaries=3,
        rms=[1.0, math.nan, 2.0],
        ang=[0.1, math.inf],
        loss=-math.inf,
        step=7,
        nan_first="blocks.1 (step 7)",
    )
    text = json.dumps(Ladder((profile,)).to_dict(), allow_nan=False)
    assert Ladder.from_dict(json.loads(text)) == Ladder((profile,))
    assert profile.rms == [1.0, None, 2.0]
    assert profile.unfit == {"rms": [1], "ang": [1], "loss": [0]}
    assert profile.first_broken == 1


def test_series_that_are_left_out_are_not_measured():
    profile = Profile(boundaries=3)
    assert all(getattr(profile, name) == [None] * 3 for name in BOUNDARY)
    assert all(getattr(profile, name) == [None] * 2 for name in BLOCK)
    assert all(getattr(profile, name) is None for name in SCALAR)
    assert profile.top_channels == [[], [], []]
    assert profile.gain == [None, None]
    assert profile.G is None
    assert profile.first_broken is None
    assert not profile.gradient_broken


@pytest.mark.parametrize("name", LARGEST)
def test_headroom_is_the_distance_to_the_formats_largest_number(name: Format):
    largest = torch.finfo(TYPES[name]).max
    profile = Profile(boundaries=4, max_abs=[largest, largest / 8, 0.0, None])
    assert profile.headroom(name) == [0.0, 3.0, math.inf, None]


def test_gains_telescope_to_the_gradients_ratio():
    profile = Profile(boundaries=5, grad_h=[16.0, 8.0, 2.0, 4.0, 1.0])
    assert profile.gain == [2.0, 4.0, 0.5, 4.0]
    assert profile.G == 8.0 == math.prod(x for x in profile.gain[1:] if x)


def test_lost_and_broken_gradients():
    assert Profile(boundaries=3, grad_h=[0.0, 0.0, 1.0]).G == 0.0
    assert Profile(boundaries=3, grad_h=[0.0, 0.0, 0.0]).G is None
    assert Profile(boundaries=3, grad_h=[1.0, math.inf, 1.0]).gradient_broken
    assert Profile(boundaries=3, grad_broken=[0.0, 0.5, 0.0]).gradient_broken


def test_growth_of_each_block():
    assert Profile(boundaries=4, rms=[0.0, 1.0, 2.0, 3.0]).growth == [None, 2.0, 1.5]


def test_the_first_boundary_with_a_broken_state_is_named():
    assert Profile(boundaries=4, broken=[0.0, 0.0, 0.1, 1.0]).first_broken == 2


def test_ladders_sort_and_refuse_doubles():
    profiles = [Profile(boundaries=n, step=step, seed=seed) for n in (13, 7) for step in (30, 0) for seed in (1, 0)]
    ladder = Ladder(tuple(profiles))
    assert ladder.depths == (6, 12)
    assert ladder.snapshots == ("before", "after")
    assert [profile.seed for profile in ladder.at(12, "after")] == [0, 1]
    assert {profile.depth for profile in ladder.deepest("before")} == {12}
    with pytest.raises(NormLabError, match="two profiles of depth 6, after training, seed 0"):
        Ladder((Profile(boundaries=7, step=30), Profile(boundaries=7, step=7)))
    with pytest.raises(NormLabError, match="at least one"):
        Ladder(())


def test_bad_records_are_refused_in_one_line():
    with pytest.raises(NormLabError, match="rms must have 3 entries, got 2"):
        Profile(boundaries=3, rms=[1.0, 2.0])
    with pytest.raises(NormLabError, match="top_channels must have 2 entries"):
        Profile(boundaries=2, top_channels=[[1]])
    with pytest.raises(NormLabError, match="at least one block"):
        Profile(boundaries=1)
    with pytest.raises(NormLabError, match="did you mean 'rms'"):
        Profile.from_dict({"boundaries": 2, "rmss": []})
    with pytest.raises(NormLabError, match="no 'boundaries'"):
        Profile.from_dict({})
    with pytest.raises(NormLabError, match="no 'profiles'"):
        Ladder.from_dict({})
    with pytest.raises(NormLabError, match="unknown number format"):
        Profile(boundaries=2).headroom("fp17")  # type: ignore[arg-type]
