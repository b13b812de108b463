"""The guard: every bad step is seen, and no fine one is."""

from __future__ import annotations

import json
import math
import random

import pytest

from normlab import NormLabError
from normlab.train.monitor.guard import Guard


def curve(steps, seed=0):
    """A loss as it falls in training, with noise of a few per cent."""
    noise = random.Random(seed)
    return [1.5 + 4.0 / math.sqrt(1 + k / 5) + noise.gauss(0.0, 0.05) for k in range(steps)]


def seasoned(policy="stop", **options) -> Guard:
    guard = Guard(policy, **options)
    for loss in curve(200):
        guard.judge(loss, 1.0)
    return guard


@pytest.mark.parametrize("seed", range(5))
def test_training_as_usual_is_fine(seed):
    guard = Guard()
    assert all(guard.judge(loss, 1.0).is_fine for loss in curve(2000, seed))


def test_a_flat_loss_may_ripple():
    guard = Guard()
    for _ in range(50):
        guard.judge(2.0, 1.0)
    # Median 2, deviation 0: the floor of 1 % times 10 allows a tenth.
    assert guard.threshold() == pytest.approx(2.2)
    assert guard.judge(2.199, 1.0).is_fine
    assert guard.judge(2.201, 1.0).kind == "spike"


@pytest.mark.parametrize("level", [0.0, 1e-8, 0.003])
def test_data_learnt_by_heart_have_no_spikes(level):
    """Images that are classified without a mistake: a loss of 7e-9 exceeded 0, and every harder batch was skipped."""
    guard = Guard()
    for _ in range(50):
        guard.judge(level, 1e-6)
    assert guard.threshold() == pytest.approx(level + 0.1)
    assert guard.judge(level + 0.09, 1e-6).is_fine
    assert guard.judge(level + 0.11, 1.0).kind == "spike"


def test_the_threshold_is_the_formula():
    guard = Guard(spike=3.0, window=5, least=5)
    for loss in (9.0, 1.0, 2.0, 4.0, 8.0, 16.0):
        guard.losses.append(loss)
    # The last five: median 4; deviations 3, 2, 0, 4, 12, median 3.
    assert guard.threshold() == pytest.approx(4.0 + 3.0 * 1.4826 * 3.0)


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_the_policy_says_what_to_do(policy):
    guard = seasoned(policy)
    verdict = guard.judge(50.0, 123.0)
    assert (verdict.kind, verdict.action) == ("spike", policy)
    assert "50" in verdict.detail
    assert "123" in verdict.detail
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)):
        assert guard.judge(loss, norm).kind == "nonfinite"
    assert guard.judge(2.0, 1.0).action == "go"


def test_bad_steps_leave_no_trace_in_the_window():
    guard, clean = seasoned("skip"), seasoned("skip")
    for bad in (math.nan, 50.0, math.inf):
        guard.judge(bad, 1.0)
    assert guard.threshold() == clean.threshold()


def test_a_step_without_a_target_is_no_measure():
    guard, clean = seasoned("skip"), seasoned("skip")
    for _ in range(200):
        assert guard.judge(0.0, 0.0).action == "go"
    assert guard.threshold() == clean.threshold()


def test_the_first_steps_are_judged_for_being_finite_alone():
    guard = Guard(least=4)
    losses = (5.0, 500.0, 5.0, math.nan, 5.0)
    assert [guard.judge(loss, 1.0).kind for loss in losses] == ["fine", "fine", "fine", "nonfinite", "fine"]
    assert guard.threshold() < math.inf


def test_too_many_bad_steps_stop_the_run():
    guard = seasoned("skip", limit=3)
    assert [guard.judge(math.nan, 1.0).action for _ in range(3)] == ["skip", "skip", "stop"]
    guard = seasoned("skip", limit=3)
    actions = [guard.judge(loss, 1.0).action for loss in (math.nan, math.nan, 2.0, math.nan)]
    assert actions == ["skip", "skip", "go", "skip"]


def test_a_level_that_stays_is_no_spike():
    guard = seasoned("skip", patience=3, limit=5)
    verdicts = [guard.judge(50.0, 1.0) for _ in range(3)]
    assert [verdict.action for verdict in verdicts] == ["skip"] * 3
    assert "3 in a row, so it is taken for the new level" in verdicts[-1].detail
    assert [guard.judge(50.0, 1.0).kind for _ in range(20)] == ["fine"] * 20
    # What is not finite has no level, and spikes among it do not make one.
    guard = seasoned("skip", patience=3, limit=5)
    actions = [guard.judge(loss, 1.0).action for loss in (math.nan, 50.0, math.nan, 50.0, math.nan)]
    assert actions == ["skip"] * 4 + ["stop"]
    # Under the other policies every spike counts.
    guard = seasoned("rollback", patience=3, limit=5)
    assert [guard.judge(50.0, 1.0).action for _ in range(5)] == ["rollback"] * 4 + ["stop"]


def test_a_restart_changes_nothing():
    one, other = seasoned("skip"), Guard("skip")
    one.judge(math.nan, 1.0)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.judge(x, 1.0) for x in (2.0, 9.0, 60.0)] == [other.judge(x, 1.0) for x in (2.0, 9.0, 60.0)]
    assert one.state_dict() == other.state_dict()


def test_rolling_back_for_ever_is_impossible():
    guard = seasoned("rollback", limit=3)
    saved = guard.state_dict()
    actions = []
    for _ in range(3):
        actions.append(guard.judge(math.nan, 1.0).action)
        guard.rewind(saved)
    assert actions == ["rollback", "rollback", "stop"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "skipp"}, "did you mean 'skip'"),
        ({"spike": 0.0}, "spike must be positive"),
        ({"spike": math.nan}, "spike must be positive"),
        ({"window": 4, "least": 5}, "least must lie in"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(NormLabError, match=message):
        Guard(**options)
