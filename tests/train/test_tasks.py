"""Runs that learn something else than the next token: stopped, killed, spoilt and read back like all others."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch

import normlab
from normlab import DecoderConfig, EncoderConfig, NormLabError, TrainConfig, VisionConfig
from normlab.data import IGNORED
from normlab.train.distributed import ALONE
from normlab.train.evaluate import evaluate
from normlab.train.result import TrainResult
from normlab.train.trainer import train
from normlab.utils.files import write_json
from tests.command import normlab as normlab_says
from tests.matrix import parametrize
from tests.ranks import PRELOAD
from tests.train import child
from tests.train.runs import (
    MODEL,
    RUN,
    STEPS,
    after_building,
    asks_to_stop,
    events,
    losses,
    numbers,
    same_run,
    spoils,
    weights,
)

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

SHARED = {name: RUN[name] for name in ("batch", "evals", "saves", "lr", "device")}
TASKS = ["masked", "images"]


def config_of(task: str, text: Path, *, steps: int = STEPS, model: dict | None = None, **changes) -> TrainConfig:
    shape = MODEL | (model or {})
    if task == "images":
        known = SHARED | {"images": steps * SHARED["batch"], "shift": 1}
        return TrainConfig(task="images", model=VisionConfig(**shape), **known | changes)
    known = {**RUN, "tokens": steps * RUN["batch"] * RUN["length"], "data": (str(text),)}
    return TrainConfig(task="masked", model=EncoderConfig(**shape), **known | changes)


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory) -> dict[str, Path]:
    """Runs that nothing disturbed."""
    found = {}
    for task in TASKS:
        found[task] = tmp_path_factory.mktemp("straight") / task
        assert train(config_of(task, text), found[task], progress=False).state == "done"
    return found


# -- stopped, killed, spoilt -----------------------------------------------------------------------------------------


@parametrize("task", TASKS, quick=["masked"])
def test_stopped_and_resumed_it_is_the_same_run(task, text, straight, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        after_building(patch, asks_to_stop(7))
        assert train(config_of(task, text), tmp_path / "run", progress=False).state == "stopped"
    assert train(config_of(task, text), tmp_path / "run", progress=False).state == "done"
    assert [event["what"] for event in events(tmp_path / "run")] == ["saved", "resume"]
    same_run(tmp_path / "run", straight[task])


@pytest.mark.full
def test_killed_and_resumed_it_is_the_same_run(text, straight, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    children = {}
    for task in TASKS:
        options = (json.dumps(config_of(task, text).to_dict()), tmp_path / task, "step")
        children[task] = context.Process(target=child.main, args=options)
        children[task].start()
    for task, process in children.items():
        deadline = time.monotonic() + 300
        while not (tmp_path / f"{task}.ready").exists():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.join()
        assert train(config_of(task, text), tmp_path / task, progress=False).state == "done"
        assert [(event["what"], event["step"]) for event in events(tmp_path / task)] == [("resume", 4)]
        same_run(tmp_path / task, straight[task])


@parametrize("task", TASKS, quick=["masked"])
def test_a_value_that_is_not_finite_is_found_and_skipped(task, text, tmp_path, monkeypatch):
    after_building(monkeypatch, spoils({5}))
    assert train(config_of(task, text), tmp_path, progress=False).state == "done"
    found = events(tmp_path, "nonfinite")
    assert [(event["step"], event["layer"]) for event in found] == [(5, "stack.layers.1")]
    assert (tmp_path / "trouble" / "step-00000005.safetensors").is_file()
    assert torch.isfinite(torch.tensor([loss for loss in losses(tmp_path) if loss is not None])).all()


@pytest.mark.parametrize("task", TASKS)
def test_accumulated_parts_are_one_batch(task, text, straight, tmp_path):
    # Masked batches differ in how many targets their parts have, so only images are cut without a difference.
    train(config_of(task, text, accumulate=2, evals=1, saves=0), tmp_path, progress=False)
    mine, theirs = losses(tmp_path)[0], losses(straight[task])[0]
    assert mine == pytest.approx(theirs, rel=1e-5 if task == "images" else 0.1)


@parametrize("task", TASKS, quick=["images"])
@parametrize("changes", [{"optimiser": "muon"}, {"base_dim": 16}], quick=[{"optimiser": "muon"}], ids=str)
def test_muon_and_transfer_train_them_too(task, changes, text, tmp_path):
    result = train(config_of(task, text, steps=3, evals=1, saves=0, **changes), tmp_path, progress=False)
    assert result.state == "done"
    run = normlab.load_run(tmp_path)
    data = run.config.task_object.open(run.config, progress=False)
    assert evaluate(run.model.loss_and_accuracy, data, run.config, ALONE) == result.scores


def test_a_step_without_a_target_has_no_loss(text, tmp_path, monkeypatch):
    # Eight tokens a step, each masked with probability 0.05: two steps of three have no target, and 40 without one or
    # 40 with one come once in 10⁷ runs.
    config = config_of("masked", text, tokens=320, length=8, batch=1, mask=0.05, evals=1, saves=0)
    trainers = []
    after_building(monkeypatch, trainers.append)
    train(config, tmp_path, progress=False)
    without = [record for record in numbers(tmp_path) if record["kind"] == "step" and record["grad_norm"] == 0.0]
    assert 0 < len(without) < 40
    assert {record["loss"] for record in without} == {None}
    known = [r["loss"] for r in numbers(tmp_path) if r["kind"] == "step" and r["grad_norm"] > 0.0]
    assert None not in known
    # Zeros would make a run that learns nothing look as if it did.
    assert trainers[0].watch.state_dict()["losses"] == known


def test_a_text_with_nothing_to_find_is_refused_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.txt").write_text("hello world")
    config = config_of("masked", tmp_path / "tiny.txt", length=4)
    with pytest.raises(NormLabError, match="none of the 1 validation tokens is masked"):
        train(config, tmp_path / "run", progress=False)
    # What did not begin can be corrected in place.
    assert not (tmp_path / "run" / "status.json").exists()


# -- evaluations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_an_evaluation_is_the_mean_over_all_targets(task, straight):
    run = normlab.load_run(straight[task])
    config, kind = run.config, run.config.task_object
    data = kind.open(config, progress=False)
    scores = evaluate(kind.measure(run.model), data, config, ALONE)
    assert scores == {name: run.metrics("eval")[-1][name] for name in ("loss", "accuracy")}
    assert scores.items() <= run.status["result"].items()
    nats, right, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in kind.evaluation(config, data, batch=5):
            scored = batch.targets != IGNORED
            logits = run.model(batch.inputs, **batch.options)[scored].double()
            nats -= torch.log_softmax(logits, -1).gather(-1, batch.targets[scored, None]).sum().item()
            right += int((logits.argmax(-1) == batch.targets[scored]).sum())
            count += int(scored.sum())
    assert scores["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert scores["accuracy"] == pytest.approx(right / count, rel=1e-6)
    assert count == len(data.val) if task == "images" else 0 < count < 0.3 * config.eval_tokens


def test_all_seeds_answer_the_same_questions(text, straight):
    one = normlab.load_run(straight["masked"]).config
    kind = one.task_object
    data = kind.open(one, progress=False)
    batches = [next(kind.evaluation(dataclasses.replace(one, seed=seed), data, batch=4)) for seed in (0, 1)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    lines = [kind.line(dataclasses.replace(one, seed=seed), data).read(0, 4) for seed in (0, 1)]
    assert not torch.equal(lines[0].inputs, lines[1].inputs)


# -- read back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_read_back(task, straight):
    run = normlab.load_run(straight[task])
    assert run.config.task == task
    assert type(run.model).__name__ == {"masked": "Encoder", "images": "VisionTransformer"}[task]
    assert weights(straight[task]).keys() == dict(run.model.named_parameters()).keys()
    assert {record["kind"] for record in numbers(straight[task])} == {"step", "eval", "profile"}
    with pytest.raises(NormLabError, match=f"holds a model of the task {task}, which writes no text") as caught:
        run.generate("x")
    assert "\n" not in str(caught.value)


def test_classes_have_their_names_and_the_mask_its_token(straight):
    assert normlab.load_run(straight["images"]).classes == list("0123456789")
    run = normlab.load_run(straight["masked"])
    assert run.tokenizer.vocab_size == 257
    # 256 bytes, an end, a mask, rounded up.
    assert run.config.model.vocab_size == 320
    kind = run.config.task_object
    batch = kind.line(run.config, kind.open(run.config, progress=False)).read(0, 64)
    assert batch.inputs.max() == 257
    assert batch.targets.max() < 256


def test_documents_can_be_kept_apart(text, tmp_path):
    config = config_of("masked", text, steps=2, evals=1, saves=0, boundaries="respected")
    assert train(config, tmp_path, progress=False).state == "done"


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_round_trip_through_json(task, text):
    config = config_of(task, text)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.identity != dataclasses.replace(config, seed=1).identity


def test_runs_that_were_made_before_there_were_tasks(tmp_path):
    # Names of runs as commit b030235 made them: TrainConfig().name, and the second one's likewise.
    assert TrainConfig(model=DecoderConfig(tied=None)).name == "pre-lr0.001-seed0-08665875"
    assert TrainConfig.preset("125m", scheme="peri", lr=3e-4, tied=None).name == "peri-lr0.0003-seed0-b1616790"
    before = {name: value for name, value in TrainConfig().to_dict().items() if name != "task"}
    assert TrainConfig.from_dict(before) == TrainConfig()
    assert not {"mask", "images", "shift", "flip"} & before.keys()
    old = {
        "state": "done", "reason": None, "loss": 1.5, "bits_per_byte": 2.0, "steps": 3, "tokens": 4, "seconds": 1.0,
        "tokens_per_s": 4.0, "peak_bytes": None, "device": "CPU",
    }  # fmt: skip
    result = TrainResult.from_dict(old)
    assert (result.loss, dict(result.scores)) == (1.5, {"loss": 1.5, "bits_per_byte": 2.0})
    later = ("gpu", "first_loss", "unigram_entropy", "stuck", "stuck_at", "diverged")
    assert result.to_dict() == old | dict.fromkeys(later)
    write_json(tmp_path / "config.json", {"config": before, "versions": {}, "device": "CPU"})
    assert normlab.load_run(tmp_path).config == TrainConfig()


def test_a_task_fills_in_what_suits_it():
    config = TrainConfig(task="images")
    assert (config.data, config.val_fraction, type(config.model)) == (("digits",), 0.2, VisionConfig)
    assert (config.sequence, config.steps) == (17, 6250)
    assert TrainConfig(task="masked").data == TrainConfig().data == ("python",)
    vision = TrainConfig.preset("vit-s", task="images", scheme="geonorm", lr=3e-4)
    assert (vision.model.image_size, vision.model.depth, vision.lr) == (224, 12, 3e-4)
    assert TrainConfig.preset("125m", task="masked").length == 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "imagse"}, "unknown task 'imagse'; did you mean 'images'"),
        ({"task": "images", "tokenizer": "bpe:300"}, "task images has no tokenizer; leave it out"),
        ({"task": "images", "tokens": 5}, "task images has no tokens"),
        ({"mask": 0.3}, "task language has no mask"),
        ({"task": "masked", "mask": 0.0}, r"mask must lie in \(0, 1\]"),
        ({"task": "masked", "shift": 1}, "task masked has no shift"),
        ({"task": "images", "images": 0}, "images must be at least 1"),
        ({"task": "images", "val_fraction": 0.0}, "got 0: a run needs validation data; leave it out for 0.2, or name"),
        ({"val_fraction": 0.0}, "got 0: a run needs validation data; leave it out for 0.02, or name val_data"),
        ({"task": "images", "shift": 8}, "shift must be from 0 to less than an image's size"),
    ],
    ids=str,
)
def test_mistakes_get_one_line(fields, message):
    with pytest.raises(NormLabError, match=message) as caught:
        TrainConfig(**fields)
    assert "\n" not in str(caught.value)


def test_images_of_one_class_are_refused_before_the_run(tmp_path):
    """Every step had a loss of 0 and no gradient, the curve was NaN, and the entropy of the classes -0.00."""
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    (tmp_path / "photographs/cat").mkdir(parents=True)
    for shade in range(10):
        pillow.new("L", (8, 8), 20 * shade).save(tmp_path / f"photographs/cat/{shade}.png")
    config = TrainConfig(task="images", data=(str(tmp_path / "photographs"),), images=16, device="cpu")
    with pytest.raises(NormLabError, match="all training images are of one class, 'cat', so there is nothing to learn"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_with_validation_data_holds_nothing_out():
    assert TrainConfig(val_data=("b",), val_fraction=0.0) == TrainConfig(val_data=("b",))


def test_a_model_of_another_task_gets_one_line():
    with pytest.raises(
        NormLabError, match="trains a model of a EncoderConfig, got a DecoderConfig; try task 'language'"
    ):
        TrainConfig(task="masked", model=DecoderConfig())


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_help_of_a_task_shows_what_it_has():
    text = normlab_says("train", "--task", "images", "--help").stdout
    assert all(flag in text for flag in ("--image-size", "--shift", "--images", "--pooling", "--scheme"))
    assert not any(flag in text for flag in ("--tokenizer STR", "--length INT", "--vocab-size", "--mask FLOAT"))
    text = normlab_says("train", "--help").stdout
    assert "--tokenizer STR" in text
    assert "--image-size INT" not in text


@pytest.mark.parametrize("task", ["language", "images"])
def test_the_help_of_a_comparison_shows_no_flag_that_it_refuses(task):
    text = normlab_says("compare", "--task", task, "--help").stdout
    assert all(f"{flag} " in text for flag in ("--schemes", "--lrs", "--seeds", "--weight-decay", "--depth"))
    assert not any(f"{flag} " in text for flag in ("--scheme", "--lr", "--seed"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "images", "--tokenizer", "bytes"), "task images has no tokenizer; leave it out, or try --task"),
        (("--image-size", "8"), "task language has no image-size; leave it out, or try --task images"),
        (("--task", "masked", "--no-flip"), "task masked has no flip; leave it out, or try --task images"),
        (("--task", "pictures"), "unknown task 'pictures'"),
        (("--task", "images", "--preset", "125m"), "unknown preset '125m'; known: digits, vit-b, vit-s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_other_tasks_get_one_line(words, message):
    found = normlab_says("train", *words)
    assert found.returncode == 2
    assert message in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_train_from_the_command_line(tmp_path):
    sizes = ("--depth", "1", "--dim", "16", "--heads", "2", "--evals", "1", "--saves", "0", "--device", "cpu")
    found = normlab_says("train", "--task", "images", "--images", "64", "--out", str(tmp_path / "i"), *sizes)
    assert found.returncode == 0, found.stderr
    assert "% of the images right" in found.stdout
    said = normlab_says("generate", "--run", str(tmp_path / "i"))
    assert said.returncode == 2
    assert "writes no text; name a run of the task language" in said.stderr
    page = normlab_says("report", str(tmp_path / "i"), "--markdown")
    assert "validation accuracy" in page.stdout
