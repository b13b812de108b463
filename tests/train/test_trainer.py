"""One run: what it writes, what it refuses, and that how it is computed does not change what is computed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from normlab.data import evaluation_batches, prepare
from normlab.errors import NormLabError
from normlab.train.distributed import ALONE, Group
from normlab.train.evaluate import evaluate
from normlab.train.plan import milestones
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import read_records
from normlab.train.trainer import Trainer, train
from tests.train.runs import after_building, config_of, losses, numbers, same_run, weights

CPU = torch.device("cpu")


# -- what it writes ------------------------------------------------------------------------------------------------


def test_the_files_of_a_run(straight, text):
    assert sorted(path.name for path in straight.iterdir()) == [
        "config.json", "lock", "metrics.jsonl", "model.safetensors", "status.json", "tokenizer.json",
    ]  # fmt: skip
    assert RunFolder(straight).config.identity == config_of(text).identity
    status = RunFolder(straight).status
    assert (status["state"], status["step"], status["tokens"], status["reason"]) == ("done", 20, 20 * 4 * 32, None)
    assert status["result"]["steps"] == 20
    facts = json.loads((straight / "config.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__


def test_the_records_of_a_run(straight, text):
    records = read_records(straight / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    assert list(steps[0]) == [
        "kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "seconds", "waited", "memory_bytes",
    ]  # fmt: skip
    config = config_of(text)
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert [record["tokens"] for record in steps] == [128 * k for k in range(1, 21)]
    assert [record["lr"] for record in steps] == [config.lr * config.rate(k) for k in range(20)]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(steps))
    assert all(record["tokens_per_s"] > 0 and 0 < record["mfu"] < 1 for record in steps)
    assert [r["step"] for r in records if r["kind"] == "eval"] == [5, 10, 15, 20]
    # One before the first step, and one with every evaluation.
    assert [r["step"] for r in records if r["kind"] == "profile"] == [0, 5, 10, 15, 20]
    assert all(r["layers"] == [0, 1, 2] for r in records if r["kind"] == "profile")
    assert not [r for r in records if r["kind"] == "event"]


def test_the_first_loss_is_that_of_the_model_and_the_first_batch(text, straight):
    """Against a plain computation: a whole product with the embedding, torch's own loss."""
    seen = []

    class Plain(Trainer):
        def _gradient(self, parts):
            logits = self.model(parts[0].inputs)
            seen.append(F.cross_entropy(logits.flatten(0, 1), parts[0].targets.flatten()).item())
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normlab.train.trainer.Trainer", Plain)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(text), straight.parent / "plain", progress=False)
    # Another order of summation over 128 tokens.
    assert losses(straight)[0] == pytest.approx(seen[0], rel=1e-6)


def test_the_rate_that_is_recorded_is_the_one_that_was_used(text, tmp_path, monkeypatch):
    used = []

    def change(trainer: Trainer) -> None:
        update = trainer._update
        trainer._update = lambda: (used.append(trainer.optimiser.param_groups[0]["lr"]), update())

    after_building(monkeypatch, change)
    train(config_of(text), tmp_path, progress=False)
    assert used == [record["lr"] for record in numbers(tmp_path) if record["kind"] == "step"]


def test_an_evaluation_is_the_mean_over_all_tokens(text):
    config = config_of(text, boundaries="respected", eval_tokens=10**9)
    corpus = prepare(config.data, val_fraction=config.val_fraction, progress=False)
    logits = torch.randn(320, 320)

    def loss(inputs, targets, *, documents):
        assert documents is not None
        return F.cross_entropy(logits[inputs].flatten(0, 1), targets.flatten())

    nats, bits = evaluate(loss, corpus, config, ALONE).values()
    (batch,) = evaluation_batches(corpus.val, length=corpus.val.n_tokens, batch=1)
    expected = F.cross_entropy(logits[batch.inputs].double().flatten(0, 1), batch.targets.flatten()).item()
    assert nats == pytest.approx(expected, rel=1e-6)
    assert bits == pytest.approx(expected * corpus.val.n_tokens / corpus.val.n_bytes / math.log(2), rel=1e-6)


def test_weights_are_whole_and_finite(straight):
    assert all(bool(tensor.isfinite().all()) for tensor in weights(straight).values())


# -- what it refuses -----------------------------------------------------------------------------------------------


def test_a_finished_run_is_only_read(straight, text, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in straight.iterdir() if path.name != "lock"}
    monkeypatch.setattr(Trainer, "__init__", None)
    result = train(config_of(text), straight, progress=False)
    assert result.to_dict() == RunFolder(straight).status["result"]
    assert (result.state, result.steps, result.tokens) == ("done", 20, 20 * 4 * 32)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 1e-4}, "its lr is 0.003, not 0.0001"),
        ({"model": {"depth": 3}}, "its depth is 2, not 3"),
        ({"model": {"scheme": "pre"}}, "its scheme is 'peri', not 'pre'"),
        ({"saves": 2, "keep": 7, "trouble": "stop"}, "its trouble is 'skip', not 'stop'"),
        ({"steps": 21}, "its tokens is 2560, not 2688"),
    ],
)
def test_another_configuration_is_refused(straight, text, changes, named):
    with pytest.raises(NormLabError) as refused:
        train(config_of(text, **changes), straight, progress=False)
    assert named in str(refused.value)
    assert "choose another folder with --out, or remove this one" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_does_not_decide_the_result_may_change(straight, text):
    assert train(config_of(text, saves=1, keep=5), straight, progress=False).state == "done"


def test_a_run_that_never_began_may_be_corrected(text, tmp_path):
    with pytest.raises(NormLabError, match="absent"):
        train(config_of(tmp_path / "absent.txt"), tmp_path / "run", progress=False)
    assert RunFolder(tmp_path / "run").status == {"state": "new"}
    assert train(config_of(text, steps=2), tmp_path / "run", progress=False).state == "done"
    assert RunFolder(tmp_path / "run").config.data == (str(text),)


def test_a_file_in_the_way(text, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(NormLabError, match=r"cannot make .*run: File exists; choose another folder with --out"):
        train(config_of(text), tmp_path / "run", progress=False)


def test_a_batch_that_processes_cannot_share(text, tmp_path):
    with pytest.raises(NormLabError, match="batch 4 cannot be shared by 3 processes in 1 parts; make it a multiple"):
        Trainer(config_of(text), RunFolder(tmp_path), Group(0, 3, CPU), None, False)


def test_what_nobody_foresaw_leaves_a_reason(text, straight, tmp_path):
    def fail(trainer: Trainer) -> None:
        update = trainer._update
        trainer._update = lambda: update() if trainer.step < 7 else fail_with("out of\nmemory")

    def fail_with(message: str) -> None:
        raise RuntimeError(message)

    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, fail)
        with pytest.raises(RuntimeError, match="out of\nmemory"):
            train(config_of(text), tmp_path / "run", progress=False)
    status = RunFolder(tmp_path / "run").status
    assert (status["state"], status["reason"], status["step"]) == ("failed", "RuntimeError: out of memory", 7)
    # The lock is free again and the run goes on.
    assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)


def test_one_part_that_does_not_close_keeps_no_other_open(text, tmp_path, monkeypatch):
    closed = []

    def change(trainer: Trainer) -> None:
        loader, meter = trainer.loader.close, trainer.meter.close
        trainer.loader.close = lambda: (loader(), closed.append("loader"))
        trainer.meter.close = lambda: (meter(), closed.append("meter"), 1 / 0)

    after_building(monkeypatch, change)
    with pytest.raises(ZeroDivisionError):
        train(config_of(text, steps=1), tmp_path, progress=False)
    assert closed == ["loader", "meter"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_refused_for_memory_leaves_nothing(begun, text, tmp_path, monkeypatch):
    folder, config = tmp_path / "runs" / "new", config_of(text, steps=1)
    if begun:
        train(config, folder, progress=False)
        (folder / "status.json").write_text('{"state": "stopped"}')
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 1000)
    with pytest.raises(NormLabError, match="memory"):
        train(config, folder, progress=False)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [({"cuda_graphs": "on"}, "there is no GPU"), ({"sinks": ("wandb",)}, "wandb is not installed")],
)
def test_a_run_that_asks_for_what_is_not_there_leaves_nothing(change, line, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(NormLabError, match=line):
        train(config_of(text, steps=1, **change), tmp_path / "runs" / "new", progress=False)
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_data_is_too_short_leaves_nothing(text, tmp_path):
    file, folder = tmp_path / "few.txt", tmp_path / "runs" / "new"
    file.write_text("a few words")
    with pytest.raises(NormLabError, match="fewer than one window"):
        train(dataclasses.replace(config_of(text, steps=1), data=(str(file),)), folder, progress=False)
    assert not folder.parent.exists()


# -- how it is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "evals", "saves", "evaluated"),
    [(1, 10, 10, [1]), (3, 10, 10, [1, 2, 3]), (4, 0, 0, [4]), (5, 1, 1, [5]), (5, 2, 0, [2, 5])],
)
def test_few_steps_and_no_evaluations(steps, evals, saves, evaluated, text, tmp_path):
    result = train(config_of(text, steps=steps, evals=evals, saves=saves), tmp_path, progress=False)
    assert (result.state, result.steps) == ("done", steps)
    assert [record["step"] for record in numbers(tmp_path) if record["kind"] == "eval"] == evaluated
    assert result.loss == losses(tmp_path, "eval")[-1]


@pytest.mark.parametrize(
    ("count", "steps", "expected"),
    [(0, 7, set()), (3, 9, {3, 6, 9}), (5, 2, {1, 2}), (1, 1, {1}), (10**12, 3, {1, 2, 3})],
)
def test_milestones(count, steps, expected):
    assert milestones(count, steps) == expected


@pytest.mark.full
def test_checkpoints_change_nothing(text, straight, tmp_path):
    train(config_of(text, saves=0), tmp_path / "none", progress=False)
    train(config_of(text, saves=20, keep=1), tmp_path / "all", progress=False)
    for name in ("none", "all"):
        same_run(tmp_path / name, straight)


def test_activation_checkpointing_changes_nothing(text, straight, tmp_path):
    train(config_of(text, model={"checkpointing": True}), tmp_path, progress=False)
    # The same kernels on the same numbers, only twice.
    same_run(tmp_path, straight)


def test_bf16_is_near_fp32(text, straight, tmp_path):
    train(config_of(text, precision="bf16"), tmp_path, progress=False)
    found, expected = losses(tmp_path), losses(straight)
    assert found != expected
    # Products are rounded to 8 bits; the loss is a mean over many of them.
    assert found == pytest.approx(expected, rel=2.0**-7)


def test_in_a_thread(text, straight, tmp_path):
    """Signals are for the main thread; a run elsewhere does without."""
    thread = threading.Thread(target=train, args=(config_of(text), tmp_path), kwargs={"progress": False})
    thread.start()
    thread.join()
    same_run(tmp_path, straight)


def test_width_transfer(text, straight, tmp_path):
    train(config_of(text, base_dim=32), tmp_path / "same", progress=False)
    assert losses(tmp_path / "same") == pytest.approx(losses(straight), rel=1e-5)
    wide = config_of(text, base_dim=32, model={"dim": 128})
    assert train(wide, tmp_path / "wide", progress=False).state == "done"
    found = losses(tmp_path / "wide")
    assert found[-1] < found[0] - 1.0


def test_depth_transfer(text, straight, tmp_path):
    depth = config_of(text).model.depth
    train(config_of(text, base_depth=depth), tmp_path / "same", progress=False)
    assert losses(tmp_path / "same") == pytest.approx(losses(straight), rel=1e-5)
    deep = config_of(text, base_depth=depth, model={"depth": 4 * depth})
    assert train(deep, tmp_path / "deep", progress=False).state == "done"
    found = losses(tmp_path / "deep")
    assert found[-1] < found[0] - 1.0


@pytest.mark.full
# The whole compiler once; a batch in parts is the same code to compile, which need not become machine code again.
@pytest.mark.parametrize(("accumulate", "backend"), [(1, "inductor"), (2, "aot_eager")])
def test_compiled(accumulate, backend, text, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    result = train(config_of(text, compile="yes", accumulate=accumulate), tmp_path, progress=False)
    assert result.state == "done"
    # Fused kernels round in another order.
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-4)
    assert losses(tmp_path, "eval") == pytest.approx(losses(straight, "eval"), rel=1e-4)
