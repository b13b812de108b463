"""What a run says while it trains: the estimate, the speed, the time left."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from normlab.data import prepare
from normlab.train import hardware
from normlab.train.distributed import ALONE
from normlab.train.evaluate import evaluate
from normlab.train.plan import Workload
from normlab.train.progress import Meter, StepClock
from normlab.train.trainer import train
from tests.train.runs import config_of

CPU = torch.device("cpu")


def test_it_says_what_it_expects_and_how_it_goes(text, tmp_path, capfd):
    train(config_of(text, steps=3), tmp_path, progress=True)
    said = capfd.readouterr().err.splitlines()
    expected = next(line for line in said if "expect about" in line)
    # No more is known on a machine of unknown speed than that both are there.
    assert "3 steps of 4 × 32 tokens on CPU" in expected
    assert "TFLOP/s in products" in expected
    assert expected.endswith("MiB and 1 s, of which 1 s for 3 evaluations of 512 tokens")
    assert any("step 3/3  loss" in line and "tok/s" in line for line in said)
    # Only a GPU has a peak to compare with.
    assert not any("of peak" in line for line in said)


def test_the_estimate_counts_evaluations_as_a_third_of_training(text):
    config = config_of(text, steps=10, evals=4, eval_tokens=200)
    data = prepare(config.data, val_fraction=config.val_fraction, progress=False)
    work = Workload.of(config, data)
    # 200 tokens are 7 windows of 32, in batches of 4 windows: two batches, the last one padded.
    assert (work.evals, work.tokens_an_eval) == ((2, 5, 7, 10), 256)
    assert work.left(0) == pytest.approx(10 * 128 + 4 * 256 / 3)
    assert work.left(5) == pytest.approx(5 * 128 + 2 * 256 / 3)
    assert work.left(10) == 0.0
    assert Workload.of(dataclasses.replace(config, evals=0), data).evals == (10,)


def test_an_evaluation_says_how_far_it_is(text):
    config = config_of(text, batch=1)
    data, shares = prepare(config.data, val_fraction=config.val_fraction, progress=False), []
    evaluate(lambda inputs, targets: torch.zeros(()), data, config, ALONE, progress=shares.append)
    # 400 tokens are 13 sequences, four at a time.
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_a_long_evaluation_shows_progress(text, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("normlab.utils.progress._PLAIN_SECONDS", 0.0)
    train(config_of(text, steps=1, batch=1, evals=1), tmp_path, progress=True)
    said = capfd.readouterr().err
    assert "step 1/1  evaluating: 25 %" in said
    assert "step 1/1  evaluating: 100 %" in said


def test_the_time_left_includes_evaluations(capfd, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    work = {"left": lambda step: (10 - step) * 50 + 4500.0}
    meter = Meter("run", steps=10, tokens_a_step=50, flops_a_token=7, peak=7000.0, progress=True, **work)
    now[0] = 31.0
    meter.show(5, {"loss": 1.0, "tokens_per_s": 50.0, "mfu": 0.1})
    assert capfd.readouterr().err.endswith("2 min left\n")


@pytest.mark.parametrize("shown", [True, False])
def test_only_a_gpu_has_a_peak_to_show(shown, capfd):
    meter = Meter("run", steps=1, tokens_a_step=50, flops_a_token=7, peak=7000.0, progress=True, shows_peak=shown)
    meter.show(1, {"loss": 1.0, "tokens_per_s": 50.0, "mfu": 0.1})
    assert ("10 % of peak" in capfd.readouterr().err) == shown


def test_it_says_nothing_when_told_so(text, tmp_path, capfd):
    train(config_of(text, steps=1), tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")


def test_speed_is_tokens_over_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = Meter("run", steps=10, tokens_a_step=50, flops_a_token=7, peak=7000.0, progress=False)
    meter.restart(3)
    now[0] += 2.0
    # Two steps of 50 tokens in two seconds, of 1000 tokens a second at best.
    assert meter.speed(5) == {"tokens_per_s": 50.0, "mfu": 0.05}
    now[0] += 1.0
    assert meter.speed(6)["tokens_per_s"] == 50.0


def test_speed_is_steady_where_steps_are_heard_of_late(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = Meter("run", steps=99, tokens_a_step=50, flops_a_token=7, peak=7000.0, progress=False)
    now[0] = 40.0
    # The first step compiles, which says nothing about the next ones.
    assert meter.speed(1)["tokens_per_s"] == 1.25
    for step in range(2, 40):
        now[0] = 40.0 + step - 1 + (0.9 if step % 3 else 0.0)
        rate = meter.speed(step)["tokens_per_s"]
        assert step < 18 or rate == pytest.approx(50.0, rel=0.9 / 15)


def test_the_clock_counts_only_while_it_runs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock()
    assert clock.seconds == 0.0
    clock.seconds = 5.0
    clock.start()
    now[0] += 2.0
    assert clock.seconds == 7.0
    clock.stop()
    now[0] += 2.0
    assert clock.seconds == 7.0
    clock.stop()
    clock.start()
    now[0] += 1.0
    assert clock.seconds == 8.0


def test_measuring_the_machine_disturbs_no_random_numbers():
    before = torch.get_rng_state()
    assert hardware.matmul_ceiling.__wrapped__(CPU, torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)
