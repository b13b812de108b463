"""A run that is resumed from its folder alone, continued when it was done, or used before it is."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys

import pytest

import normlab
from normlab import NormLabError
from normlab.cli import main
from normlab.train.resume import resumed
from normlab.train.storage.folder import RunFolder
from normlab.train.trainer import train
from normlab.utils.files import read_json, write_json
from tests.train.runs import STEPS, after_building, asks_to_stop, config_of, normlab_train, numbers, same_run, weights

BATCH = 4 * 32
"""Tokens a step."""


@pytest.fixture
def stopped(text, tmp_path):
    """The folder of a run that was stopped after step 9."""
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, asks_to_stop(9))
        train(config_of(text), tmp_path / "run", progress=False)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    """The folder of a finished run that can be continued."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert train(config_of(text), folder, progress=False, continuable=True).state == "done"
    return folder


@pytest.fixture
def finished(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


# -- resumed -------------------------------------------------------------------------------------------------------


def test_resuming_needs_no_other_flag(stopped, straight, monkeypatch, capsys):
    assert normlab_train(monkeypatch, "--resume", str(stopped)) == 0
    same_run(stopped, straight)
    assert f"run in {stopped}" in capsys.readouterr().out


def test_resuming_another_task_needs_no_other_flag(text, tmp_path, monkeypatch):
    from tests.train.test_tasks import config_of as config_of_task

    with monkeypatch.context() as patch:
        after_building(patch, asks_to_stop(2))
        train(config_of_task("masked", text, steps=4, evals=1), tmp_path / "run", progress=False)
    assert normlab_train(monkeypatch, "--resume", str(tmp_path / "run")) == 0
    assert RunFolder(tmp_path / "run").status["state"] == "done"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--lr", "1"),
            r"holds another run \(its lr is 0.003, not 1.0\); with --resume only the budget can be changed",
        ),
        (("--tokens", "1M"), "is stopped, and only a finished run can be continued with more; finish it first"),
        (("--out", "elsewhere"), "--resume names the folder of the run already; leave out --out"),
    ],
)
def test_what_a_resumed_run_does_not_take_is_one_line(stopped, words, line, monkeypatch, capsys):
    before = (stopped / "config.json").read_bytes()
    assert normlab_train(monkeypatch, "--resume", str(stopped), *words) == 2
    assert re.search(line, capsys.readouterr().err)
    assert (stopped / "config.json").read_bytes() == before


def test_a_folder_that_is_no_run_is_one_line(tmp_path, monkeypatch, capsys):
    assert normlab_train(monkeypatch, "--resume", str(tmp_path)) == 2
    assert "is not a run: it has no config.json" in capsys.readouterr().err


# -- continued -----------------------------------------------------------------------------------------------------


def test_only_the_last_checkpoint_is_kept(done, straight):
    assert [path.name for path in (done / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]
    same_run(done, straight)


def test_killed_after_the_last_checkpoint(finished, straight, text):
    # Everything is written but the state "done": the evaluation and the profile at the end are not recorded twice.
    RunFolder(finished).set_status("running", step=STEPS)
    assert train(config_of(text), finished, progress=False, continuable=True).state == "done"
    same_run(finished, straight)


def test_a_finished_run_is_continued_with_more_tokens(finished, straight, text, monkeypatch, capsys):
    assert normlab_train(monkeypatch, "--resume", str(finished), "--tokens", str(30 * BATCH)) == 0
    said = capsys.readouterr().err
    assert f"continuing {finished} from step 20 to 30: the cosine schedule is stretched over all steps" in said
    steps = [record for record in numbers(finished) if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 31))
    before = [record for record in numbers(straight) if record["kind"] == "step"]
    assert steps[:STEPS] == before
    # From there on the schedule of the longer run.
    longer = config_of(text, steps=30)
    assert [record["lr"] for record in steps[STEPS:]] == [longer.lr * longer.rate(step) for step in range(20, 30)]
    config = normlab.load_run(finished).config
    assert (config.tokens, config.continued) == (30 * BATCH, (STEPS,))
    # It is not the run that 30 steps from the start would have been, and does not pass for it.
    assert config.identity != longer.identity
    with pytest.raises(NormLabError, match=r"holds another run \(its continued is"):
        train(longer, finished, progress=False)


@pytest.mark.full
def test_a_continued_run_is_the_same_when_it_is_stopped_on_the_way(finished, done, tmp_path, monkeypatch):
    longer = dataclasses.replace(RunFolder(finished).config, tokens=30 * BATCH)
    other = shutil.copytree(done, tmp_path / "other")
    train(resumed(other, longer), other, progress=False)
    with monkeypatch.context() as patch:
        after_building(patch, asks_to_stop(24))
        assert train(resumed(finished, longer), finished, progress=False).state == "stopped"
    assert normlab_train(monkeypatch, "--resume", str(finished)) == 0
    same_run(finished, other)


@pytest.mark.parametrize(("steps", "line"), [(10, "name a larger budget"), (30, "the optimiser's state at its end")])
def test_what_cannot_be_continued_says_why(straight, tmp_path, steps, line):
    folder = shutil.copytree(straight, tmp_path / "run")
    config = dataclasses.replace(RunFolder(folder).config, tokens=steps * BATCH)
    with pytest.raises(NormLabError, match=line) as refused:
        resumed(folder, config)
    assert "\n" not in str(refused.value)
    assert RunFolder(folder).status["state"] == "done"


@pytest.mark.parametrize("file", ["compare.json", "ladder.json"])
def test_a_folder_of_other_results_is_refused(file, text, tmp_path):
    (tmp_path / file).write_text("{}")
    with pytest.raises(NormLabError, match=rf"holds a \w+ \({file}\); choose another folder with --out"):
        train(config_of(text), tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"model_type": "llama"}', r"config\.json is not that of a run; expected a folder made by normlab train"),
        ("[1]", r"config\.json is not that of a run"),
        ('{"config": {"model": {"nosuch": 1}}}', r"config\.json cannot be read \(TypeError: .*nosuch.*\); restore it"),
        ('{"config": {"model": 3}}', r"config\.json cannot be read \(TypeError: "),
        ('{"config": 3}', r"config\.json cannot be read \(AttributeError: "),
    ],
)
def test_a_configuration_that_is_none_of_a_run_is_one_line(written, message, tmp_path):
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(NormLabError, match=message) as error:
        _ = RunFolder(tmp_path).config
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("written", ["{}", "[]"])
def test_a_status_without_a_state_is_one_line(written, tmp_path):
    (tmp_path / "status.json").write_text(written)
    with pytest.raises(NormLabError, match=r"status\.json says no state of a run; restore it, or remove it"):
        _ = RunFolder(tmp_path).status


def test_the_configuration_of_a_model_is_not_overwritten(text, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NormLabError, match="is not that of a run"):
        train(config_of(text), tmp_path, progress=False)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'


# -- a lost config.json --------------------------------------------------------------------------------------------


def test_a_lost_configuration_is_not_replaced_by_another(stopped, straight, text):
    (stopped / "config.json").unlink()
    with pytest.raises(NormLabError, match=r"holds another run \(its lr is 0.003, not 0.001\)"):
        train(config_of(text, lr=1e-3), stopped, progress=False)
    assert not (stopped / "config.json").exists()
    # The same settings are the same run.
    assert train(config_of(text), stopped, progress=False).state == "done"
    assert RunFolder(stopped).config.identity == config_of(text).identity
    same_run(stopped, straight)


def test_the_weights_know_the_configuration_as_well(straight, text, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run")
    (folder / "config.json").unlink()
    with pytest.raises(NormLabError, match="holds another run"):
        train(config_of(text, seed=3), folder, progress=False)
    train(config_of(text), folder, progress=False)
    assert RunFolder(folder).config.identity == config_of(text).identity


def test_a_configuration_that_nothing_tells_of_is_asked_for(stopped, text):
    (stopped / "config.json").unlink()
    for state in stopped.glob("checkpoints/*/state.json"):
        known = read_json(state)
        del known["extra"]["config"]
        write_json(state, known)
    with pytest.raises(NormLabError, match=r"has lost its config\.json, so its settings are not known; restore"):
        train(config_of(text), stopped, progress=False)


def test_a_lost_status_does_not_let_other_settings_in(stopped, text):
    (stopped / "status.json").unlink()
    with pytest.raises(NormLabError, match="holds another run"):
        train(config_of(text, seed=3), stopped, progress=False)


# -- used before its end -------------------------------------------------------------------------------------------


def test_a_checkpoint_writes_text(stopped, straight, monkeypatch, capsys):
    run = normlab.load_run(stopped)
    text = run.generate("ab", tokens=5, seed=0)
    assert text.startswith("ab")
    monkeypatch.setattr(sys, "argv", ["normlab", "generate", "--run", str(stopped), "--prompt", "ab", "--tokens", "5",
                                      "--seed", "0"])  # fmt: skip
    main.main()
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(sys, "argv", ["normlab", "generate", "--run", str(stopped), "--tokens", "0"])
    with pytest.raises(SystemExit) as refused:
        main.main()
    assert refused.value.code == 2
    assert capsys.readouterr().err == "normlab: --tokens must be at least 1, got 0; try 200\n"


def test_the_weights_are_those_of_the_newest_checkpoint(stopped, text, tmp_path):
    found = normlab.load_run(stopped).model.state_dict()
    # A run that goes on from there changes them.
    train(config_of(text), stopped, progress=False)
    after = weights(stopped)
    assert any((found[name] != after[name]).any() for name in after)


def test_a_checkpoint_of_version_0_1_is_read_with_its_data(stopped):
    newer = normlab.load_run(stopped).generate("ab", tokens=5, seed=0)
    (stopped / "tokenizer.json").unlink()
    for state in stopped.glob("checkpoints/*/state.json"):
        known = json.loads(state.read_text())
        del known["extra"]["config"]
        text = json.dumps(known, indent=1) + "\n"
        state.write_text(text)
        manifest = read_json(state.with_name("manifest.json"))
        from normlab.utils.files import digest

        manifest["files"]["state.json"] = digest(state)
        write_json(state.with_name("manifest.json"), manifest)
    assert normlab.load_run(stopped).generate("ab", tokens=5, seed=0) == newer


def test_a_run_without_a_checkpoint_says_so(text, tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin(config_of(text), "cpu")
    with pytest.raises(NormLabError, match=r"has no weights and no checkpoint yet .*; let it go on"):
        normlab.load_run(tmp_path).model  # noqa: B018
