"""Schedules against their formulas: exact ends, no wasted step, no jump."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from normlab import NormLabError
from normlab.train.schedule import check, decay_start, multiplier

KINDS = ["cosine", "linear", "wsd", "wsd-linear", "constant"]


def curve(total, **options):
    return [multiplier(step, total=total, **options) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_ends_are_exact(kind, warmup, final):
    values = curve(40, kind=kind, warmup=warmup, final=final)
    assert values[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert values[max(warmup - 1, 0)] == 1.0
    assert values[-1] == (1.0 if kind == "constant" else final)
    assert all(0.0 <= value <= 1.0 for value in values)
    assert multiplier(10**9, total=40, kind=kind, warmup=warmup, final=final) == values[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_rises_then_falls(kind):
    values = curve(50, kind=kind, warmup=10, final=0.05)
    assert values[:10] == sorted(values[:10])
    assert values[9:] == sorted(values[9:], reverse=True)


def test_cosine_is_torchs_own():
    # torch counts T_max steps from the peak to the end and starts at the peak, as we do without warm-up.
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=29, eta_min=0.1)
    for ours in curve(30, kind="cosine", warmup=0, final=0.1):
        # Theirs is a recursion: one rounding or two per step.
        assert ours == pytest.approx(optimiser.param_groups[0]["lr"], abs=60 * 2**-53)
        optimiser.step()
        theirs.step()


def test_linear_is_a_line():
    values = curve(21, kind="linear", warmup=5, final=0.2)
    assert values[4:] == pytest.approx([1 - 0.8 * k / 16 for k in range(17)], abs=1e-15)


def test_wsd_is_stable_then_falls_like_a_root():
    values = curve(100, kind="wsd", warmup=10, final=0.0, decay_fraction=0.3)
    assert values[9:70] == [1.0] * 61
    assert values[70:] == pytest.approx([1 - math.sqrt(k / 30) for k in range(1, 31)], abs=1e-15)


def test_wsd_linear_is_stable_then_falls_like_a_line():
    values = curve(100, kind="wsd-linear", warmup=10, final=0.1, decay_fraction=0.3)
    assert values[9:70] == [1.0] * 61
    assert values[70:] == pytest.approx([1 - 0.9 * k / 30 for k in range(1, 31)], abs=1e-15)


@pytest.mark.parametrize("kind", ["wsd", "wsd-linear"])
@pytest.mark.parametrize("decay", [0.01, 0.2, 0.5])
def test_before_its_decay_a_wsd_schedule_does_not_depend_on_the_number_of_steps(kind, decay):
    options = {"kind": kind, "warmup": 7, "final": 0.1, "decay_fraction": decay}
    short, long = curve(40, **options), curve(90, **options)
    begin = decay_start(total=40, kind=kind, decay_fraction=decay)
    assert short[:begin] == long[:begin]
    assert short[begin] < long[begin] == 1.0


def test_a_schedule_that_decays_from_the_start_has_no_such_step():
    with pytest.raises(NormLabError, match="schedule cosine has no constant rate before its decay; try schedule wsd"):
        decay_start(total=40, kind="cosine", decay_fraction=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_runs(kind):
    assert multiplier(0, total=1, kind=kind, warmup=0, final=0.0) == 1.0
    assert multiplier(0, total=1, kind="cosine", warmup=1, final=0.0) == 1.0
    assert curve(2, kind=kind, warmup=0, final=0.5) == [1.0, 1.0 if kind == "constant" else 0.5]
    assert curve(3, kind="linear", warmup=3, final=0.0)[-1] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cosin"}, "did you mean 'cosine'"),
        ({"total": 0}, "at least 1 step"),
        ({"warmup": -1}, "warmup must lie in"),
        ({"warmup": 11}, "warmup must lie in"),
        ({"final": 1.5}, "final must lie in"),
        ({"final": math.nan}, "final must lie in"),
        ({"decay_fraction": 0.0}, "decay must lie in"),
        ({"kind": "wsd", "warmup": 6, "decay_fraction": 0.5}, "do not fit into 10; lower warmup or decay$"),
    ],
)
def test_bad_options_are_refused_in_one_line(change, message):
    options = {"total": 10, "kind": "cosine", "warmup": 2, "final": 0.1} | change
    with pytest.raises(NormLabError, match=message) as error:
        check(**options)
    assert "\n" not in str(error.value)
    with pytest.raises(NormLabError, match="negative"):
        multiplier(-1, total=10, kind="cosine", warmup=2, final=0.1)


def test_it_needs_no_torch():
    code = "import sys, normlab.train.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
