"""Runs that learn no more than how often each answer occurs: marked, stopped on request, and no others."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from normlab import DecoderConfig
from normlab.data import IGNORED, prepare
from normlab.train.config import TrainConfig
from normlab.train.monitor import stuck
from normlab.train.monitor.stuck import StuckWatch
from normlab.train.result import TrainResult, ending
from normlab.train.storage.folder import RunFolder
from normlab.train.tasks import find_task
from normlab.train.trainer import Trainer, train
from tests.matrix import parametrize
from tests.train.runs import after_building, asks_to_stop, config_of, events, losses, numbers, same_run, spikes

NEVER = {"lr": 1e-9}
"""A rate at which nothing is learnt."""


@pytest.fixture(scope="module")
def dice(text, tmp_path_factory) -> Path:
    """Text of which nothing can be learnt but how often its letters occur; after `text`, for its cache."""
    path = tmp_path_factory.mktemp("dice") / "dice.txt"
    path.write_text("".join(random.Random(0).choices("abcd", weights=[4, 2, 1, 1], k=20_000)))
    return path


@pytest.fixture
def soon(monkeypatch):
    """Judge a run six steps after warm-up, over three steps."""
    monkeypatch.setattr(stuck, "PATIENCE", 6)
    monkeypatch.setattr(stuck, "WINDOW", 3)


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "evaluated", "found"),
    [
        (3.0, 3.0, True),
        (2.91, 2.91, True),
        (2.89, 2.89, False),
        # By heart, or with auxiliary losses: one of the two tells that something was learnt.
        (1.0, 9.0, False),
        (9.0, 1.0, False),
        (3.0, math.nan, True),
    ],
)
def test_both_losses_must_be_above_the_entropy_less_a_tenth(trained, evaluated, found):
    watch = StuckWatch(3.0, 10, "the unigram entropy")
    watch.take(trained)
    assert watch.mark(310, evaluated) is found
    assert watch.is_stuck is found


def test_the_window_is_the_last_fifty_steps():
    watch = StuckWatch(3.0, 0, "")
    assert watch.is_doubtful
    for loss in [9.0] * 7 + [2.0] * 50:
        watch.take(loss)
    assert watch.loss == 2.0
    watch.take(52.0)
    assert watch.loss == 3.0


def test_it_is_due_three_hundred_steps_after_warm_up():
    assert StuckWatch(3.0, 40, "").due == 340
    assert TrainConfig(tokens=1000 * 16 * 256, warmup=0.1).warmup_steps == 100


def test_the_entropy_is_that_of_the_targets_of_an_evaluation(text):
    """Against counting in Python: bytes and one end for the document, the first 300 tokens of the validation side."""
    config = config_of(text, eval_tokens=300)
    data = prepare(config.data, val_fraction=config.val_fraction, progress=False)
    trained, asked = (
        Counter(side.ids[side.starts[0] :][: side.lengths[0]].tolist()) for side in (data.train, data.val)
    )
    first = data.val.ids[data.val.starts[0] :][:300].tolist()
    total = trained.total() + data.tokenizer.vocab_size
    expected = -sum(math.log((trained[token] + 1) / total) for token in first) / 300
    assert asked.total() > 300
    assert config.task_object.guess_loss(config, data) == pytest.approx(expected, rel=1e-12)


def test_masked_tokens_are_never_ends(text):
    config = TrainConfig(task="masked", data=(str(text),), val_fraction=0.05, length=32, tokens=1000)
    task = find_task("masked")
    data = task.open(config, progress=False)
    trained, asked = task.target_counts(config, data)
    assert trained[data.tokenizer.end] == asked[data.tokenizer.end] == 0
    targets = [batch.targets[batch.targets != IGNORED] for batch in task.evaluation(config, data, batch=8)]
    assert asked.sum() == sum(len(found) for found in targets)


def test_images_are_guessed_by_their_classes():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    config = TrainConfig(task="images", images=64)
    data = config.task_object.open(config, progress=False)
    # Ten digits, nearly as often each.
    assert config.task_object.guess_loss(config, data) == pytest.approx(math.log(10), abs=0.01)


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_has_nothing_to_learn_is_stuck_at_the_entropy(dice, tmp_path, monkeypatch):
    """A run that has learnt all that there is, and no more: letters drawn one by one."""
    monkeypatch.setattr(stuck, "PATIENCE", 150)
    result = train(config_of(dice, steps=200, lr=1e-2), tmp_path, progress=False)
    assert (result.state, result.stuck) == ("done", True)
    # Letters of 1/2, 1/4, 1/8 and 1/8; among 1,000 for validation their shares stray by 0.016.
    assert result.unigram_entropy == pytest.approx(1.75 * math.log(2), abs=0.05)
    assert result.loss == pytest.approx(result.unigram_entropy, abs=0.05)
    assert [event["step"] for event in events(tmp_path, "stuck")] == [160]
    # It was evaluated for that.
    assert 160 in [record["step"] for record in numbers(tmp_path) if record["kind"] == "eval"]


def test_what_learns_is_not(text, tmp_path, monkeypatch):
    monkeypatch.setattr(stuck, "PATIENCE", 180)
    result = train(config_of(text, steps=200, lr=1e-2, evals=1), tmp_path, progress=False)
    assert (result.state, result.stuck) == ("done", False)
    assert result.loss < result.unigram_entropy - 0.1
    assert events(tmp_path, "stuck") == []
    # Nobody had to look twice.
    assert [record["step"] for record in numbers(tmp_path) if record["kind"] == "eval"] == [200]


@pytest.mark.usefixtures("soon")
def test_without_being_asked_it_goes_on(text, tmp_path):
    result = train(config_of(text, **NEVER), tmp_path, progress=False)
    assert (result.state, result.steps, result.stuck, result.reason) == ("done", 20, True, None)
    # Warm-up takes one step. The limit lets `normlab watch` see that a run has recovered.
    limit = result.unigram_entropy - stuck.MARGIN
    assert [(event["step"], event["limit"]) for event in events(tmp_path, "stuck")] == [(7, pytest.approx(limit))]


@pytest.mark.usefixtures("soon")
@parametrize("lags", [False, True], quick=[False])
def test_a_hopeless_run_is_stopped_and_only_read_afterwards(lags, text, tmp_path, monkeypatch):
    after_building(monkeypatch, lambda trainer: setattr(trainer, "lags", lags))
    config = config_of(text, **NEVER, stop_hopeless=True)
    result = train(config, tmp_path, progress=False)
    assert (result.state, result.steps, result.stuck) == ("stuck", 7, True)
    assert result.reason.startswith(f"stuck above the unigram entropy ({result.unigram_entropy:.2f}): loss ")
    assert result.reason.endswith(" after 7 steps; stopped early")
    assert result.loss == losses(tmp_path, "eval")[-1]
    assert len(losses(tmp_path)) == 7
    assert RunFolder(tmp_path).status["state"] == "stuck"
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "checkpoints").exists()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(config, tmp_path, progress=False).to_dict() == result.to_dict()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("soon")
def test_a_hopeless_run_killed_after_its_last_checkpoint_trains_no_further(text, tmp_path, monkeypatch):
    config = config_of(text, **NEVER, stop_hopeless=True)
    straight = train(config, tmp_path / "straight", progress=False, continuable=True)
    with monkeypatch.context() as patch:

        def killed(*_):
            raise KeyboardInterrupt

        patch.setattr(Trainer, "_result", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False, continuable=True)
    result = train(config, tmp_path / "run", progress=False, continuable=True)
    assert (result.state, result.steps, result.reason) == ("stuck", 7, straight.reason)
    same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.full
@pytest.mark.usefixtures("soon")
def test_asking_changes_nothing_for_a_run_that_learns(text, tmp_path, monkeypatch):
    monkeypatch.setattr(stuck, "MARGIN", -10.0)
    train(config_of(text), tmp_path / "plain", progress=False)
    result = train(config_of(text, stop_hopeless=True), tmp_path / "asked", progress=False)
    assert (result.state, result.stuck) == ("done", False)
    same_run(tmp_path / "asked", tmp_path / "plain")


@pytest.mark.usefixtures("soon")
@parametrize("stop", [5, 7, 9], quick=[7])
def test_the_window_is_kept_in_checkpoints(stop, text, tmp_path, monkeypatch):
    """Spikes are left out, and three steps before the stop are remembered after it."""
    straight = train(config_of(text, **NEVER), tmp_path / "straight", progress=False)
    with monkeypatch.context() as patch:
        after_building(patch, asks_to_stop(stop))
        stopped = train(config_of(text, **NEVER), tmp_path / "run", progress=False)
    assert stopped.stuck is (True if stop >= 7 else None)
    kept: list[dict] = []
    with monkeypatch.context() as patch:
        after_building(patch, lambda trainer: kept.append(trainer.watch))
        result = train(config_of(text, **NEVER), tmp_path / "run", progress=False)
    assert (result.stuck, result.first_loss) == (straight.stuck, straight.first_loss)
    assert list(kept[0]._losses) == losses(tmp_path / "straight")[-3:]
    same_run(tmp_path / "run", tmp_path / "straight")
    steps = [event["step"] for event in events(tmp_path / "run", "stuck")]
    assert steps == [event["step"] for event in events(tmp_path / "straight", "stuck")] == [7]


def test_the_state_goes_through_json():
    watch = StuckWatch(3.0, 0, "it")
    for loss in (4.0, 5.0):
        watch.take(loss)
    for marked in (False, True):
        if marked:
            watch.mark(300, 4.25)
        again = StuckWatch(3.0, 0, "it")
        again.load_state_dict(json.loads(json.dumps(watch.state_dict(), allow_nan=False)))
        assert (again.loss, again.is_stuck, str(again)) == (watch.loss, watch.is_stuck, str(watch))
    # A checkpoint of version 0.1.
    again.load_state_dict({})
    assert (again.is_stuck, again.loss) == (False, math.inf)


@pytest.mark.usefixtures("soon")
def test_spikes_do_not_count(text, tmp_path, monkeypatch):
    watches: list[StuckWatch] = []
    after_building(monkeypatch, spikes({19}), lambda trainer: watches.append(trainer.watch))
    train(config_of(text, steps=20), tmp_path, progress=False)
    fine = losses(tmp_path)
    assert list(watches[0]._losses) == [fine[16], fine[17], fine[19]]


# -- what is told --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
def test_it_says_so_in_one_line(text, tmp_path, capfd):
    result = train(config_of(text, steps=10, **NEVER), tmp_path, progress=True)
    where = f"stuck above the unigram entropy ({result.unigram_entropy:.2f})"
    said = capfd.readouterr().err.splitlines()
    (line,) = (line for line in said if line.startswith(where))
    assert line.endswith(f" after 6 steps; {stuck.ADVICE}")
    # The live line, too.
    assert any("step 10/10" in line and line.split("  ")[-2] == where for line in said)


def test_the_last_lines_of_a_run(tmp_path):
    known = {"steps": 1, "tokens": 1, "seconds": 1.0, "tokens_per_s": 1.0, "peak_bytes": None, "device": "CPU"}
    scores = {"loss": 6.97, "bits_per_byte": 2.5}
    language = find_task("language")
    done = TrainResult(state="done", reason=None, scores=scores, unigram_entropy=6.96, stuck=True, **known)
    assert ending(done, language, Path("runs/a")) == (
        "done: 6.9700 nats a token, 2.5000 bits a byte\n"
        f"stuck at the unigram entropy (6.96): {stuck.ADVICE}\n"
        "run in runs/a"
    )
    recovered = {"scores": scores | {"loss": 3.2}, "steps": 900, "stuck_at": 310}
    back = TrainResult(state="done", reason=None, unigram_entropy=6.96, stuck=True, **(known | recovered))
    assert ending(back, language, Path("runs/a")).splitlines()[1] == (
        "was stuck at step 310 (not 0.1 below the unigram entropy, 6.96); its loss at the end is 3.20"
    )
    early = TrainResult(state="stuck", reason="stuck at X", scores=scores, unigram_entropy=6.96, stuck=True, **known)
    assert ending(early, language, Path("runs/a")).splitlines()[1:] == ["run in runs/a: stuck at X"]
    failed = TrainResult(state="failed", reason="nan", **known)
    assert ending(failed, find_task("images"), Path("runs/a")) == "run in runs/a: nan"


def test_results_of_version_0_1_know_nothing_of_it():
    old = {
        "state": "done", "reason": None, "steps": 1, "tokens": 1, "seconds": 1.0, "tokens_per_s": 1.0,
        "peak_bytes": None, "device": "CPU", "gpu": None, "loss": 2.0, "bits_per_byte": 1.0,
    }  # fmt: skip
    found = TrainResult.from_dict(old)
    assert (found.stuck, found.first_loss, found.unigram_entropy) == (None, None, None)
    assert found.scores == {"loss": 2.0, "bits_per_byte": 1.0}


def test_the_names_of_stored_runs_stay():
    # As version 0.1 named it.
    assert TrainConfig(model=DecoderConfig(tied=None), stop_hopeless=False).identity == "08665875"
    assert TrainConfig().identity != TrainConfig(stop_hopeless=True).identity


def test_checkpoints_are_part_of_the_name_where_a_rollback_goes_to_them():
    for trouble, counts in (("skip", False), ("stop", False), ("none", False), ("rollback", True)):
        names = {TrainConfig(trouble=trouble, **change).identity for change in ({}, {"saves": 7}, {"keep": 5})}
        assert len(names) == (3 if counts else 1)
