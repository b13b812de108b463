"""Records folded into bounded memory: means of the curve, profiles of both writers, alarms."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from normlab.checks import Watch
from normlab.watch.curve import LossCurve
from normlab.watch.history import History
from normlab.watch.profiles import MEASURES, read_profile
from tests.watch.made import evaluation, event, profile, step


def taken(*records: dict) -> History:
    history = History()
    for record in records:
        history.take(record)
    return history


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 1000])
def test_a_long_curve_is_the_means_of_its_steps(count: int) -> None:
    """Against means computed from all losses at once."""
    curve = LossCurve(most=8)
    losses = [math.sin(k) + 2.0 for k in range(1, count + 1)]
    for k, loss in enumerate(losses, start=1):
        curve.add(k, 512 * k, loss, float(k))
    found, every = curve.columns(), curve.every
    assert every == max(1, 2 ** math.ceil(math.log2(count / 8)))
    parts = [losses[at : at + every] for at in range(0, count, every)]
    # Points have five digits.
    assert found["loss"] == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-4)
    assert found["step"] == [min(at + every, count) for at in range(0, count, every)]
    assert found["grad_norm"] == found["step"]
    assert found["tokens"] == [512 * last for last in found["step"]]


def test_losses_that_are_not_finite_leave_a_gap() -> None:
    curve = LossCurve(most=2)
    for k, loss in enumerate([1.0, None, None, math.nan], start=1):
        curve.add(k, None, loss)
    assert curve.columns()["loss"] == [1.0, None]


def test_memory_does_not_grow_with_the_run() -> None:
    history = taken(*(r for k in range(1, 3001) for r in (step(k), evaluation(k), event(k, "spike", "x" * 5000))))
    assert len(history.curve.columns()["loss"]) <= 400
    assert len(history.evals) <= 500
    assert (history.evals[0]["step"], history.evals[-1]["step"]) == (1, 3000)
    assert len(history.alarms) == 50
    assert history.counts["warn"] == 3000
    assert len(history.alarms[-1]["detail"]) == 1000


def test_the_newest_evaluation_is_kept_however_many_there_are() -> None:
    for count in (500, 501, 502, 751, 1200):
        kept = [one["step"] for one in taken(*(evaluation(k) for k in range(1, count + 1))).evals]
        assert (kept[0], kept[-1]) == (1, count)
        assert 200 < len(kept) <= 500
        assert kept == sorted(set(kept))


def test_a_step_that_is_evaluated_again_counts_once() -> None:
    history = taken(evaluation(10, 3.0), evaluation(20, 2.5), evaluation(10, 2.0))
    assert [(one["step"], one["loss"]) for one in history.evals] == [(10, 2.0)]


def test_first_and_newest_profile_are_kept() -> None:
    history = taken(profile(0), profile(50, growth=2.0), profile(100, growth=4.0))
    first, newest = history.profiles[""]
    assert (first["step"], newest["step"]) == (0, 100)
    assert newest["hidden_rms"] == [1, 4, 16, 64, 256]
    assert newest["update_rms"][1:] == pytest.approx([math.sqrt(0.04 * 4.0**k) for k in range(1, 5)], rel=1e-4)


def test_a_deep_profile_is_thinned_with_both_ends() -> None:
    found = read_profile(profile(0, blocks=1000))
    assert found is not None
    assert len(found["layers"]) == len(found["hidden_rms"]) == 129
    assert (found["layers"][0], found["layers"][-1]) == (0, 1000)


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"kind": "step"}, {"kind": "step", "step": "1"}, {"kind": "step", "step": True}, {"kind": 3, "step": 1},
        {"kind": "profile", "step": 1}, {"kind": "profile", "step": 1, "hidden_rms": "x"},
        {"kind": "profile", "step": 1, "profile": 4}, {"kind": "profile", "step": 1, "hidden_rms": [1], "cos": [1, 2]},
        {"kind": "profile", "step": 1, "hidden_rms": [1.0], "token_cosine": [1.0, 2.0]},
        {"kind": "verdict", "step": 1}, {"kind": "verdict", "step": 1, "verdict": {}},
        {"kind": "eval", "step": 1, "loss": None}, {"kind": "event", "step": 1},
        {"kind": "step", "step": 0, "loss": []},
    ],
)  # fmt: skip
def test_odd_records_do_no_harm(odd: dict) -> None:
    history = taken(odd, step(1))
    assert history.last["step"] == 1
    json.dumps([history.curve.columns(), history.evals, list(history.alarms)], allow_nan=False)


def test_events_say_how_grave_they_are() -> None:
    found = taken(event(1, "spike", ""), event(2, "nonfinite", ""), event(3, "resume", ""), event(4, "own", "")).alarms
    assert [(alarm["level"], alarm["what"]) for alarm in found] == [
        ("warn", "spike"), ("fail", "not finite"), ("info", "resumed"), ("warn", "own")
    ]  # fmt: skip


class Block(nn.Module):
    """A block whose branch grows the state."""

    def __init__(self, gain: float):
        super().__init__()
        self.inner, self.gain = nn.Linear(8, 8), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.inner(x)


def test_what_watch_writes_is_understood(tmp_path: Path) -> None:
    """The file of a real `Watch` over a loop of one's own: loss, profile and verdicts."""
    model = nn.Sequential(*(Block(30.0) for _ in range(6)))
    watch = Watch(model, every=1, out=tmp_path / "profiles.jsonl")
    for number in range(2):
        with watch.step(number) as look:
            loss = model(torch.randn(2, 5, 8)).square().mean()
            look.record(loss=loss)
            loss.backward()
    watch.close()
    history = taken(*map(json.loads, (tmp_path / "profiles.jsonl").read_text().splitlines()))
    assert len(history.curve.columns()["loss"]) == 2
    (first, newest), *_ = history.profiles.values()
    assert (first["step"], newest["step"]) == (0, 1)
    assert len(newest["hidden_rms"]) == 7
    assert set(newest) >= {"hidden_rms", "update_rms", "grad_norm"}
    assert {name for name in newest if name not in ("step", "layers")} <= set(MEASURES)
    assert newest["update_rms"][0] is None
    assert newest["hidden_rms"][-1] > 100 * newest["hidden_rms"][0]
    assert any(alarm["level"] == "fail" and "exploding" in alarm["what"] for alarm in history.alarms)


def test_profiles_of_watch_have_the_fields_that_are_read() -> None:
    from normlab.probes.profile import Profile
    from normlab.watch.profiles import _FROM_WATCH

    assert set(_FROM_WATCH.values()) <= {spec.name for spec in dataclasses.fields(Profile)}


def test_a_watched_loss_that_is_not_finite_is_the_newest() -> None:
    """A loop of the user's own that has broken must not be shown with the last loss that was fine."""
    fine, broken, unknown = (
        {
            "kind": "profile",
            "step": number,
            "stack": "layers",
            "profile": {"rms": [1.0, 2.0], "loss": loss, "unfit": unfit},
        }
        for number, loss, unfit in ((5, 3.0, {}), (10, None, {"loss": [0]}), (15, None, {}))
    )
    assert taken(fine, broken).last == {"step": 10, "loss": None}
    assert taken(fine, unknown).last == {"step": 5, "loss": 3.0}
