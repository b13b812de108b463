"""A branch of a trunk equals, bit for bit, the run that had its budget from the start."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from normlab import NormLabError
from normlab.cli import main
from normlab.train.config import TrainConfig
from normlab.train.monitor import stuck
from normlab.train.storage.folder import RunFolder
from normlab.train.trainer import train
from normlab.utils.files import read_json
from normlab.utils.settings import typed_settings
from tests.matrix import parametrize
from tests.ranks import free_port, spawn
from tests.train.runs import (
    after_building,
    asks_to_stop,
    config_of,
    events,
    left_behind,
    normlab_train,
    numbers,
    same_run,
    spikes,
    weights,
)
from tests.train.test_distributed import TORCHRUN

BATCH = 4 * 32
"""Tokens a step."""
LONG, SHORT = 20, 10
"""Steps of the trunk and of the branch, which begins to decay at step 8."""
WSD = {"schedule": "wsd", "warmup": 3, "final": 0.0, "evals": 5}


def trunk_config(text: Path, *budgets: int, **changes) -> TrainConfig:
    return config_of(text, steps=LONG, **{**WSD, "branches": tuple(b * BATCH for b in budgets or (SHORT,)), **changes})


def planned_config(text: Path, steps: int = SHORT, **changes) -> TrainConfig:
    return config_of(text, steps=steps, **{**WSD, **changes})


def run(config: TrainConfig, folder: Path, **options) -> str:
    return train(config, folder, progress=False, **options).state


def stopped_at(step: int, config: TrainConfig, folder: Path, **options) -> None:
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, asks_to_stop(step))
        assert run(config, folder, **options) == "stopped"


@pytest.fixture(scope="module")
def trunk(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trunk") / "trunk"
    assert run(trunk_config(text), folder) == "done"
    return folder


@pytest.fixture(scope="module")
def planned(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "planned"
    assert run(planned_config(text), folder) == "done"
    return folder


# -- equal to the run that was planned -----------------------------------------------------------------------------


def test_a_branch_is_the_run_with_its_budget_from_the_start(text, trunk, planned, tmp_path):
    config = trunk_config(text).branch(SHORT * BATCH)
    assert (config.name, config.branch_step) == (planned_config(text).name, 8)
    assert run(config, tmp_path / "branch", branch_from=trunk) == "done"
    same_run(tmp_path / "branch", planned)
    assert [(event["what"], event["step"]) for event in events(tmp_path / "branch")] == [("branch", 8), ("resume", 8)]
    assert RunFolder(tmp_path / "branch").trunk == trunk.resolve()
    assert left_behind(tmp_path) == []


def test_the_trunk_is_the_run_without_branches(text, trunk, tmp_path):
    assert trunk_config(text).name == dataclasses.replace(trunk_config(text), branches=()).name
    assert run(dataclasses.replace(trunk_config(text), branches=()), tmp_path) == "done"
    found, expected = ([r for r in numbers(path) if r["kind"] == "step"] for path in (trunk, tmp_path))
    assert found == expected
    assert all((weights(trunk)[name] == value).all() for name, value in weights(tmp_path).items())


OPTIONS = {
    "muon": {"optimiser": "muon", "lr": 0.01},
    "linear": {"schedule": "wsd-linear", "final": 0.1},
    "accumulate": {"accumulate": 2, "weight_decay": 0.3},
    "muon, linear, accumulate": {"optimiser": "muon", "schedule": "wsd-linear", "accumulate": 2, "decay": 0.5},
    "no save, no evaluation": {"saves": 0, "evals": 0},
}


@parametrize("name", list(OPTIONS), quick=["muon, linear, accumulate"])
def test_with_other_options(name, text, tmp_path):
    config = trunk_config(text, **OPTIONS[name])
    run(config, tmp_path / "trunk")
    run(config.branch(SHORT * BATCH), tmp_path / "branch", branch_from=tmp_path / "trunk")
    run(planned_config(text, **OPTIONS[name]), tmp_path / "planned")
    same_run(tmp_path / "branch", tmp_path / "planned")


@pytest.mark.full
def test_several_branches_while_the_trunk_goes_on(text, planned, tmp_path):
    config = trunk_config(text, SHORT, 15)
    assert config.branch_steps == {8, 12}
    stopped_at(9, config, tmp_path / "trunk")
    run(config.branch(SHORT * BATCH), tmp_path / "short", branch_from=tmp_path / "trunk")
    same_run(tmp_path / "short", planned)
    with pytest.raises(NormLabError, match="has kept no state at step 12"):
        run(config.branch(15 * BATCH), tmp_path / "middle", branch_from=tmp_path / "trunk")
    run(config, tmp_path / "trunk")
    run(config.branch(15 * BATCH), tmp_path / "middle", branch_from=tmp_path / "trunk")
    run(planned_config(text, 15), tmp_path / "planned")
    same_run(tmp_path / "middle", tmp_path / "planned")


@parametrize(("in_trunk", "in_branch"), list(itertools.product([5, 8, 9], [None, 9])), quick=[(8, 9)])
def test_stopped_on_the_way(in_trunk, in_branch, text, planned, tmp_path):
    """Before the branch, at its step, after it; and in the branch."""
    config = trunk_config(text)
    stopped_at(in_trunk, config, tmp_path / "trunk")
    run(config, tmp_path / "trunk")
    short = config.branch(SHORT * BATCH)
    if in_branch:
        stopped_at(in_branch, short, tmp_path / "branch", branch_from=tmp_path / "trunk")
        # Resumed without its trunk.
        shutil.rmtree(tmp_path / "trunk")
        run(short, tmp_path / "branch")
    else:
        run(short, tmp_path / "branch", branch_from=tmp_path / "trunk")
    same_run(tmp_path / "branch", planned)


def breaks_at(step: int):
    """As a kill in the middle of a step: nothing is saved."""

    def change(trainer) -> None:
        go = trainer._gradient

        def gradient(parts):
            if trainer.step == step - 1:
                raise RuntimeError("broken by a test")
            return go(parts)

        trainer._gradient = gradient

    return change


@parametrize(("saves", "step", "resumed"), [(5, 7, 4), (0, 10, 8), (0, 7, None)], quick=[(0, 10, 8)])
def test_broken_on_the_way(saves, step, resumed, text, planned, tmp_path):
    """The trunk goes on from its newest checkpoint, which may be that of a branch, or from the start."""
    config = trunk_config(text, saves=saves)
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, breaks_at(step))
        with pytest.raises(RuntimeError):
            run(config, tmp_path / "trunk")
    run(config, tmp_path / "trunk")
    assert [event["step"] for event in events(tmp_path / "trunk", "resume")] == ([] if resumed is None else [resumed])
    short = config.branch(SHORT * BATCH)
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, breaks_at(9))
        with pytest.raises(RuntimeError):
            run(short, tmp_path / "branch", branch_from=tmp_path / "trunk")
    run(short, tmp_path / "branch")
    same_run(tmp_path / "branch", planned)


@pytest.mark.full
def test_killed_between_a_checkpoint_and_its_copy(text, planned, tmp_path):
    config = trunk_config(text)
    stopped_at(8, config, tmp_path / "trunk")
    shutil.rmtree(tmp_path / "trunk" / "branches")
    run(config, tmp_path / "trunk")
    run(config.branch(SHORT * BATCH), tmp_path / "branch", branch_from=tmp_path / "trunk")
    same_run(tmp_path / "branch", planned)


def test_killed_while_the_branch_is_made(text, trunk, planned, tmp_path):
    """Its records are there and its checkpoint is not: the folder knows its trunk."""
    config = trunk_config(text).branch(SHORT * BATCH)
    stopped_at(9, config, tmp_path / "branch", branch_from=trunk)
    shutil.rmtree(tmp_path / "branch" / "checkpoints")
    run(config, tmp_path / "branch")
    assert events(tmp_path / "branch", "resume")[0]["step"] == 8
    same_run(tmp_path / "branch", planned)


@pytest.mark.full
def test_what_the_guard_skipped_in_the_trunk_is_skipped_in_the_branch(text, tmp_path):
    budgets = {"steps": 40, "decay": 0.2}
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, spikes({19, 28}))
        config = config_of(text, **budgets, **WSD, branches=(30 * BATCH,))
        run(config, tmp_path / "trunk")
        run(config.branch(30 * BATCH), tmp_path / "branch", branch_from=tmp_path / "trunk")
        run(planned_config(text, 30), tmp_path / "planned")
    same_run(tmp_path / "branch", tmp_path / "planned")
    found, expected = (events(tmp_path / name, "spike", "skip") for name in ("branch", "planned"))
    assert [e["step"] for e in found] == [e["step"] for e in expected] == [19, 19, 28, 28]


def two_ranks(rank: int, ports: list[int], text: str, room: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(dict(zip(TORCHRUN, (str(rank), "2", str(rank), "127.0.0.1", ""), strict=True)))
    folder, config = Path(room), trunk_config(Path(text))
    short = config.branch(SHORT * BATCH)
    runs = [(config, "trunk", None), (short, "branch", folder / "trunk"), (short, "planned", None)]
    for port, (one, name, trunk) in zip(ports, runs, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        run(one, folder / name, branch_from=trunk)
    os._exit(0)


@pytest.mark.full
def test_two_processes(text, tmp_path):
    spawn(two_ranks, args=([free_port() for _ in range(3)], str(text), str(tmp_path)), nprocs=2)
    same_run(tmp_path / "branch", tmp_path / "planned")
    assert left_behind(tmp_path) == []


# -- stuck ---------------------------------------------------------------------------------------------------------


@parametrize("stops", [True, False], quick=[True])
def test_a_trunk_that_is_stuck(stops, text, tmp_path, monkeypatch):
    monkeypatch.setattr(stuck, "PATIENCE", 3)
    monkeypatch.setattr(stuck, "MARGIN", 9.0)
    config = trunk_config(text, SHORT, 5, stop_hopeless=stops)
    # Found stuck at step 6: after the branch at step 4, before that at step 8.
    assert run(config, tmp_path / "trunk") == ("stuck" if stops else "done")
    kept = sorted(path.name for path in (tmp_path / "trunk" / "branches").iterdir())
    assert kept == ["step-00000004", "step-00000008"][: 1 if stops else 2]
    budget = (5 if stops else SHORT) * BATCH
    run(config.branch(budget), tmp_path / "branch", branch_from=tmp_path / "trunk")
    run(config.branch(budget), tmp_path / "planned")
    same_run(tmp_path / "branch", tmp_path / "planned")
    results = [RunFolder(tmp_path / name).status["result"] for name in ("branch", "planned")]
    assert results[0]["stuck"] == results[1]["stuck"] is True
    if stops:
        with pytest.raises(NormLabError, match=r"it is stuck, at step 6\) has kept no state at step 8, .* only at 4;"):
            run(config.branch(SHORT * BATCH), tmp_path / "late", branch_from=tmp_path / "trunk")
        assert not (tmp_path / "late").exists()


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lr": 1e-3}, r"is not a trunk of this run \(its lr is 0.003, not 0.001\); a branch has its trunk's settings"),
        ({"seed": 1}, r"its seed is 0, not 1"),
        ({"model": {"depth": 3}}, r"its depth is 2, not 3"),
        ({"decay": 0.3}, r"its decay is 0.2, not 0.3"),
        ({"steps": 9}, r"has kept no state at step 7, where a run of 1,152 tokens branches off, only at 8; train it"),
        ({"steps": LONG}, "has 2,560 tokens and a branch fewer, got 2,560; name a smaller budget"),
    ],
)
def test_what_is_no_branch_of_a_trunk_is_refused_in_one_line(change, line, text, trunk, tmp_path):
    with pytest.raises(NormLabError, match=line) as refused:
        run(planned_config(text, **change), tmp_path / "branch", branch_from=trunk)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "branch").exists()


def test_evaluations_and_checkpoints_may_differ(text, trunk, planned, tmp_path):
    run(planned_config(text, evals=2, saves=1, keep=1), tmp_path / "branch", branch_from=trunk)
    assert all((weights(planned)[name] == value).all() for name, value in weights(tmp_path / "branch").items())
    assert numbers(tmp_path / "branch")[-2:] == numbers(planned)[-2:]


def test_a_trunk_without_its_records_or_with_a_torn_state(text, trunk, tmp_path):
    copy = shutil.copytree(trunk, tmp_path / "trunk")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:5]))
    with pytest.raises(NormLabError, match=r"has records of \d of the 8 steps before the branch; let the trunk go on"):
        run(planned_config(text), tmp_path / "branch", branch_from=copy)
    (copy / "metrics.jsonl").write_text("".join(lines))
    file = next((copy / "branches" / "step-00000008" / "tensors").iterdir())
    file.unlink()
    file.write_bytes(b"")
    with pytest.raises(NormLabError, match="no whole checkpoint"), pytest.warns(UserWarning, match="torn"):
        run(planned_config(text), tmp_path / "branch", branch_from=copy)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"branches": (LONG * BATCH,)}, "a branch has fewer tokens than its trunk, 2,560; got 2,560"),
        ({"branches": (0,)}, "a branch has fewer tokens than its trunk"),
        ({"branches": (BATCH,)}, "a branch of 128 tokens cannot be: warmup is . steps and the run has 1; lower warmup"),
        ({"schedule": "cosine"}, "schedule cosine has no constant rate before its decay; try schedule wsd"),
        ({"warmup": 0.2}, "warmup 0.2 is a share of the steps, .*; give it in steps, e.g. 4"),
        ({"warmup": 9}, "9 steps of warm-up and 2 of decay do not fit into 10"),
        ({"trouble": "rollback"}, "trouble rollback goes back to the newest checkpoint"),
    ],
)
def test_what_cannot_be_a_trunk_is_refused_in_one_line(change, line, text):
    with pytest.raises(NormLabError, match=line) as refused:
        trunk_config(text, **change)
    assert "\n" not in str(refused.value)


def test_the_configuration_of_a_trunk_is_stored(text, trunk):
    stored = read_json(trunk / "config.json")["config"]
    assert stored["branches"] == [SHORT * BATCH]
    assert TrainConfig.from_dict(stored) == trunk_config(text)
    assert "branches" not in planned_config(text).to_dict()
    assert re.fullmatch(r"peri-lr0.003-seed0-\w{8}", trunk_config(text).name)


# -- by hand -------------------------------------------------------------------------------------------------------


def words_of(config: TrainConfig) -> list[str]:
    """The flags of a small run."""
    names = ("length", "batch", "evals", "saves", "eval_tokens", "val_fraction", "lr", "device", "schedule", "warmup")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(config, name)))]
    model = ["--scheme", "peri", "--depth", "2", "--dim", "32", "--heads", "4", "--hidden", "48"]
    return [*words, *model, "--final", "0", "--data", *config.data]


def test_a_trunk_and_its_branch_by_hand(text, planned, tmp_path, monkeypatch, capsys):
    trunk, short = tmp_path / "trunk", tmp_path / "short"
    words = [*words_of(planned_config(text)), "--tokens", str(LONG * BATCH), "--branches", str(SHORT * BATCH)]
    assert normlab_train(monkeypatch, *words, "--out", str(trunk)) == 0
    assert normlab_train(monkeypatch, "--branch-from", str(trunk), "--tokens", "1280", "--out", str(short)) == 0
    assert f"run in {short}" in capsys.readouterr().out
    same_run(short, planned)
    assert RunFolder(short).config == planned_config(text)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "has 2,560 tokens and a branch fewer, got 2,560; name a smaller budget"),
        (("--tokens", "1000"), "has kept no state at step 6, where a run of 1,000 tokens branches off, only at 8"),
        (("--tokens", "1280", "--lr", "1"), r"is not a trunk of this run \(its lr is 0.003, not 1.0\)"),
        (("--tokens", "1280", "--branches", "640"), "a branch has no branches of its own"),
        (("--tokens", "1280", "--resume", "x"), "x is not a run"),
    ],
)
def test_mistakes_by_hand_are_one_line(words, line, trunk, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert normlab_train(monkeypatch, "--branch-from", str(trunk), *words) == 2
    assert re.search(line, error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_resume_and_branch_from_exclude_each_other(trunk, monkeypatch, capsys):
    assert normlab_train(monkeypatch, "--branch-from", str(trunk), "--resume", str(trunk)) == 2
    assert "--resume goes on with a run, --branch-from starts one" in capsys.readouterr().err


def test_a_comparison_has_no_branches(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", "compare", "--branches", "1M"])
    with pytest.raises(SystemExit):
        main.main()
    assert "a comparison has no branches; they are an option of normlab train" in capsys.readouterr().err


def test_branches_in_a_toml_file(tmp_path):
    kinds = {"branches": get_type_hints(TrainConfig, include_extras=True)["branches"]}
    for written, expected in ((["1.28k", 640], (1280, 640)), ("2M", (2_000_000,))):
        assert typed_settings({"branches": written}, tmp_path / "run.toml", kinds) == {"branches": expected}
    with pytest.raises(NormLabError, match=r"run.toml: branches: 'many' is not a count"):
        typed_settings({"branches": ["many"]}, tmp_path / "run.toml", kinds)
