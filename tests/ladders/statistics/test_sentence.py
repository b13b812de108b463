"""The sentence of a scheme says what is shown, and says when it is open."""

from __future__ import annotations

import pytest

from normlab.ladders.statistics.answer import (
    CellGap,
    Identified,
    Interval,
    Obstacle,
    Place,
    Projection,
    Trend,
    TrendTest,
    Verdict,
)
from normlab.ladders.statistics.sentence import sentence

BOTTOM = Place(name="4x256 with 29.5M tokens", size="4x256", parameters=11_600_000, tokens=29_500_000, flops=2.2e15)
TOP = Place(name="12x768 with 118M tokens", size="12x768", parameters=110_000_000, tokens=118_000_000, flops=8.5e16)
YES = Identified(is_identified=True)


def _interval(low: float, high: float) -> Interval:
    return Interval(low, high, (low + high) / 2.0, 0.95)


def _cell(low: float, high: float, multiplier: Interval | None = None) -> CellGap:
    return CellGap(
        size=TOP.size, parameters=TOP.parameters, tokens=TOP.tokens, flops=TOP.flops, tokens_per_parameter=1.07,
        steps=7200, n=3, differences={}, student=None, gap=_interval(low, high), multiplier=multiplier,
        multiplier_in_time=None, few_steps=False, is_usable=True,
    )  # fmt: skip


def _trend(verdict: Verdict, drift: Interval | None = None, change: tuple[float, float] = (0.01, 0.04)) -> Trend:
    test = TrendTest(
        axis="compute", bottom=BOTTOM, top=TOP, verdict=verdict, gap_bottom=_interval(-0.06, -0.04),
        gap_top=_interval(-0.035, -0.015), change=_interval(*change), log_multiplier_change=drift, margin=0.0124,
        margin_multiplier=1.05 if drift else None,
    )  # fmt: skip
    return Trend(verdict=verdict, compute=test, tokens=None, sizes=None)


def _projection(low: float, high: float, times: float, name: str) -> Projection:
    place = Place(name=name, size="", parameters=1, tokens=1, flops=times * TOP.flops)
    return Projection(
        place=place, times_top=times, gap=_interval(low, high), simple_law=_interval(low / 2, high / 2),
        constant_multiplier=None, multiplier=None, shrinks=0.5, shrinks_simple_law=0.5, is_smoothness=times > 100,
    )  # fmt: skip


def test_everything_that_is_shown() -> None:
    next_rung, target = _projection(-0.04, 0.02, 3.5, "3.5 × the top"), _projection(-0.08, -0.01, 200.0, "1.3b")
    text = sentence(
        "peri", "pre", _cell(-0.035, -0.015, _interval(1.05, 1.13)), _trend("shrinks", _interval(-0.03, 0.02)),
        [next_rung, target], [target], YES,
    )  # fmt: skip
    assert text == (
        "peri: better than pre by 0.025 nats (95 %: 0.015 to 0.035) at 12x768 with 118M tokens, compute multiplier "
        "1.09 (1.05 to 1.13); the gap shrinks over the ladder (-0.050 at 4x256 with 29.5M tokens to -0.025), but a "
        "change of the compute multiplier is not shown. One rung beyond (3.5 × the top) the gap is between -0.040 and "
        "+0.020: sign open (-0.020 to +0.010 if it keeps a simple law). At 1.3b the gap is between -0.080 and -0.010, "
        "if it stays smooth: better (-0.040 to -0.005 if it keeps a simple law)."
    )


def test_what_is_open_is_not_called_equal() -> None:
    trend = _trend("not shown", change=(-0.01, 0.04))
    text = sentence("peri", "pre", _cell(-0.01, 0.02), trend, [], [], YES)
    assert "no difference to pre shown at 12x768 with 118M tokens, +0.005 (95 %: -0.010 to +0.020)" in text
    assert "whether the gap moves over the ladder is not shown" in text


@pytest.mark.parametrize(
    ("change", "drift", "words"),
    [
        ((0.01, 0.04), (-0.05, -0.02), "the gap moves against it over the ladder (-0.050 at {0}), and the compute "
         "multiplier falls."),
        ((-0.04, -0.01), (0.02, 0.05), "the gap moves in its favour over the ladder (-0.050 at {0}), and the compute "
         "multiplier rises."),
        ((0.01, 0.04), (-0.05, 0.02), "the gap moves against it over the ladder (-0.050 at {0}), but a change of the "
         "compute multiplier is not shown."),
        ((-0.01, 0.04), (-0.05, 0.02), "whether the gap moves over the ladder is not shown (-0.050 at {0})."),
    ],
)  # fmt: skip
def test_a_change_that_is_shown_is_not_denied_where_it_has_no_verdict(
    change: tuple[float, float], drift: tuple[float, float], words: str
) -> None:
    trend = _trend("not shown", _interval(*drift), change)
    text = sentence("peri", "pre", _cell(-0.01, 0.02), trend, [], [], YES)
    assert text.endswith(f"; {words.format('4x256 with 29.5M tokens to -0.025')}")


def test_a_far_target_says_nothing_against_a_near_one() -> None:
    why = Identified(is_identified=False, reasons=[Obstacle(rule="wide interval", text="too wide", target="1.3b")])
    near, far = _projection(-0.08, -0.01, 4.0, "350m"), _projection(-0.8, 0.1, 200.0, "1.3b")
    text = sentence("keel", "pre", _cell(0.01, 0.03), _trend("grows"), [near, far], [near, far], why)
    assert "At 350m the gap is between -0.080 and -0.010: better" in text
    assert text.endswith("At 1.3b the gap is not identified: too wide.")


def test_a_target_that_is_not_identified_has_a_reason_and_no_number() -> None:
    why = Identified(is_identified=False, reasons=[Obstacle(rule="small ladder", text="3 rungs, fewer than 4")])
    target = _projection(-0.08, -0.01, 10.0, "10 × the top")
    text = sentence("keel", "pre", _cell(0.01, 0.03), _trend("grows", _interval(-0.2, -0.1)), [target], [target], why)
    assert text.startswith("keel: worse than pre by 0.020 nats (95 %: 0.010 to 0.030)")
    assert "the compute multiplier falls" in text
    assert text.endswith("At 10 × the top the gap is not identified: 3 rungs, fewer than 4.")
    assert "-0.080" not in text


@pytest.mark.parametrize(
    ("verdict", "drift", "words"),
    [
        ("shrinks", (-0.03, 0.02), "but a change of the compute multiplier is not shown"),
        ("shrinks", (-0.05, -0.02), "and the compute multiplier falls"),
        ("shrinks", (0.02, 0.05), "while the compute multiplier rises"),
        ("constant", (0.02, 0.05), "while the compute multiplier rises"),
    ],
)
def test_what_the_multiplier_does_is_said_beside_what_the_gap_does(
    verdict: Verdict, drift: tuple[float, float], words: str
) -> None:
    text = sentence("peri", "pre", _cell(-0.03, -0.02), _trend(verdict, _interval(*drift)), [], [], YES)
    assert text.endswith(f" to -0.025), {words}.")


def test_a_multiplier_that_moves_is_told_apart_from_a_gap_that_is_not_shown_to() -> None:
    trend = _trend("not shown", _interval(-0.05, -0.02), change=(-0.01, 0.04))
    text = sentence("peri", "pre", _cell(-0.03, -0.02), trend, [], [], YES)
    assert text.endswith(" to -0.025), but the compute multiplier falls.")


def test_constant_is_said_with_its_margin() -> None:
    known, unknown = (_trend("constant", drift) for drift in (_interval(-0.01, 0.01), None))
    with_slope, without = (sentence("peri", "pre", _cell(-0.03, -0.02), own, [], [], YES) for own in (known, unknown))
    assert "the gap changes by less than 0.012 nats, 5 % of compute, over the ladder (-0.050 at 4x256" in with_slope
    assert "the gap changes by less than 0.012 nats over the ladder (-0.050 at 4x256" in without


def test_one_rung_beyond_has_no_number_where_the_ladder_allows_none() -> None:
    why = Identified(is_identified=False, reasons=[Obstacle(rule="small ladder", text="3 rungs, fewer than 4")])
    places = [_projection(-0.08, -0.01, 3.5, "3.5 × the top"), _projection(-0.08, -0.01, 10.0, "10 × the top")]
    text = sentence("keel", "pre", _cell(0.01, 0.03), _trend("grows"), places, places[1:], why)
    said = ". One rung beyond (3.5 × the top) and at 10 × the top the gap is not identified: 3 rungs, fewer than 4."
    assert text.endswith(said)
    # Of the target alone: the rung before it keeps its number.
    wide = Identified(is_identified=False, reasons=[Obstacle(rule="wide interval", text="wide", target="10 × the top")])
    text = sentence("keel", "pre", _cell(0.01, 0.03), _trend("grows"), places, places[1:], wide)
    assert "One rung beyond (3.5 × the top) the gap is between -0.080 and -0.010: better" in text
