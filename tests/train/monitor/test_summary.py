"""The summary of a run: every spike is in it, bins are those of the plan, and a hundred fit into 10 MB."""

from __future__ import annotations

import json
import math

import pytest

from normlab.train.monitor.summary import BINS, BOUNDARIES, curve, digits, summarise
from normlab.train.trainer import train
from normlab.utils.spaced import evenly_spaced
from tests.matrix import parametrize
from tests.train.runs import after_building, config_of, spikes, spoils


def steps(losses, **more):
    return [{"kind": "step", "step": k, "loss": loss, "grad_norm": 1.0, **more} for k, loss in enumerate(losses, 1)]


def profile_of(depth, step):
    series = {name: [1.23456789e-5] * (depth + 1) for name in
              ("hidden_rms", "update_ms", "angular_speed", "token_cosine", "effective_rank", "grad_norm")}  # fmt: skip
    return {"kind": "profile", "step": step, "layers": list(range(depth + 1)), **series, "sensitivity": 0.123456}


def test_a_curve_keeps_means_and_every_spike():
    losses = [5.0 - k / 1000 for k in range(1000)]
    losses[123] = 50.0
    found = curve(steps(losses), 1000)
    assert (found["every"], len(found["mean"])) == (5, BINS)
    for place in range(BINS):
        own = losses[5 * place : 5 * place + 5]
        # Five digits.
        assert found["mean"][place] == pytest.approx(sum(own) / 5, rel=5e-5)
        assert found["max"][place] == pytest.approx(max(own), rel=5e-5)
    assert found["max"][24] == 50


def test_a_run_that_ended_early_has_the_bins_of_its_plan():
    found = curve(steps([4.0, 3.0, math.nan]), 1000)
    assert found == {"every": 5, "mean": [3.5], "max": [None], "grad_max": [1]}
    # metrics.jsonl has null for NaN.
    assert curve(steps([4.0, 3.0, None]), 1000) == found


def test_few_steps_are_kept_one_by_one():
    assert curve(steps([3.0, 2.0, 1.0]), 3)["mean"] == [3, 2, 1]
    assert summarise([], 100)["curve"]["mean"] == []


def test_trouble_is_counted():
    events = [{"kind": "event", "step": k, "what": what} for k, what in enumerate(["spike", "skip", "spike", "saved"])]
    found = summarise(events, 10)
    assert (found["spikes"], found["skipped"], found["nonfinite"], found["rollbacks"]) == (2, 1, 0, 0)


@pytest.mark.parametrize("depth", [12, 128, 1000])
def test_a_hundred_runs_stay_below_ten_megabytes(depth):
    records = steps([3.123456789 + k * 1e-5 for k in range(20_000)])
    records += [profile_of(depth, k) for k in range(12)]
    records += [{"kind": "eval", "step": k, "tokens": k, "loss": 3.123456, "bits_per_byte": 1.2} for k in range(20)]
    found = summarise(records, 20_000)
    assert len(found["profiles"][-1]["hidden_rms"]) <= BOUNDARIES
    assert 100 * len(json.dumps(found)) < 10e6


def test_the_first_and_the_last_are_kept():
    assert evenly_spaced(1000, 129)[0] == 0
    assert evenly_spaced(1000, 129)[-1] == 999
    assert evenly_spaced(3, 8) == [0, 1, 2]


@pytest.mark.parametrize(("value", "kept"), [(1.23456789, 1.2346), (3, 3), (math.nan, None), (None, None), ("x", None)])
def test_five_digits(value, kept):
    assert digits(value) == kept


# -- nothing skipped, clipped or rolled back ------------------------------------------------------------------------


def lags(trainer):
    """As on one GPU: the host hears of a step while the next one runs."""
    trainer.lags = True


@parametrize("how", [(), (lags,)], quick=[()], ids=["at once", "late"])
def test_none_takes_every_step(how, text, tmp_path, monkeypatch):
    after_building(monkeypatch, spikes({18, 19}), *how)
    config = config_of(text, trouble="none")
    result = train(config, tmp_path, progress=False)
    assert (result.state, result.steps, result.diverged) == ("done", 20, None)
    assert config.clip == math.inf
    found = summarise(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()), config.steps)
    assert (found["spikes"], found["skipped"]) == (2, 0)
    assert found["curve"]["max"][17] > 5 * found["curve"]["max"][16]
    assert [one["step"] for one in found["profiles"]] == [0, 5, 10, 15, 20]
    assert found["sensitivity"] > 0
    assert all({"first_copy_loss", "second_copy_loss"} < profile.keys() for profile in found["profiles"])
    assert not (tmp_path / "trouble").exists()


@parametrize("how", [(), (lags,)], quick=[()], ids=["at once", "late"])
def test_a_run_that_becomes_nan_has_diverged(how, text, tmp_path, monkeypatch):
    after_building(monkeypatch, spoils({7}), *how)
    result = train(config_of(text, trouble="none"), tmp_path, progress=False)
    assert (result.state, result.diverged) == ("failed", 7)
    assert result.reason == "diverged at step 7: loss is nan"


def test_gradients_are_clipped_by_default_and_not_where_nothing_is_done(text):
    assert config_of(text).clip == 1.0
    # The hash of stored runs knows nothing of this.
    assert config_of(text, trouble="none").identity != config_of(text).identity
