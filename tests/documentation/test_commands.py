"""Every `normlab` command of the README and the guides is parsed; with smaller settings, every one is run."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import pytest

from normlab import DecoderConfig, TrainConfig
from normlab.cli import main
from normlab.compare import executor
from normlab.train.trainer import train
from tests.command import normlab
from tests.compare.here import Here
from tests.documentation.commands import Command, commands, pages, reason_not_to_run, smaller, with_options
from tests.documentation.surroundings import write_images, write_surroundings

COMMANDS = [command for page in pages() for command in commands(page)]
RUN = [command for command in COMMANDS if reason_not_to_run(command) is None]
# Commands that are the same once they are smaller are run once.
ONCE = list({shlex.join(smaller(command)): command for command in RUN}.values())
# What makes a folder that later commands of the same page need.
BEFORE = {
    "report comparison": [command for command in COMMANDS if command.words == ("compare",)],
    "--branch-from": [command for command in COMMANDS if "--branches" in command.words],
}


def test_there_are_commands_on_every_kind_of_page():
    shown = {command.page for command in COMMANDS}
    assert {"README.md", "docs/start.md", "docs/concepts.md", "docs/guides/training.md"} <= shown
    assert len(COMMANDS) >= 60


def test_options_are_replaced_and_taken_away():
    words = ("train", "--data", "a", "b", "--lr", "1", "--flip")
    assert with_options(words, {"--data": "c", "--lr": None}) == ("train", "--flip", "--data", "c")


@pytest.fixture
def parsed_only(monkeypatch):
    """Verbs that are called with what was parsed, and do nothing."""

    def nothing(verb):
        @functools.wraps(verb)
        def call(*arguments, **options):
            return lambda: None

        return call

    for table in (main._VERBS, main._BENCHES):
        for name, verb in table.items():
            monkeypatch.setitem(table, name, nothing(verb))
    monkeypatch.setattr(main, "_deferred", nothing)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_its_commands_parse(page: Path, parsed_only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_surroundings(tmp_path)
    for command in commands(page):
        if "--branch-from" in command.words:  # reads the run that it branches off, which `test_it_runs` makes
            continue
        found = normlab(*command.words)
        assert found.returncode == 0, f"{command}\n{found.stdout}{found.stderr}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    config = TrainConfig(
        model=DecoderConfig(scheme="peri", depth=2, dim=32, heads=2), data=(str(folder / "text.txt"),), length=32,
        batch=4, tokens=2048, evals=1, eval_tokens=1024, saves=0,
    )  # fmt: skip
    train(config, folder / "run", progress=False)
    return folder / "run"


@pytest.mark.full
@pytest.mark.parametrize("command", ONCE, ids=str)
def test_it_runs(command: Command, trained: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    # Runs in this process: that a comparison's own processes do the same is the matter of tests/compare.
    monkeypatch.setattr(executor, "ProcessPool", Here)
    monkeypatch.syspath_prepend(tmp_path)
    write_surroundings(tmp_path)
    if "photographs/" in command.words:
        write_images(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("peri-1", "fox"):
        (tmp_path / "runs" / name).symlink_to(trained)
    line = " ".join(command.words)
    before = next((needed for words, needed in BEFORE.items() if words in line), [])
    for each in (*before[:1], command):
        found = normlab(*smaller(each))
        # 1: `--fail-on` and verdicts about a network of two blocks; 2 would be an error of input.
        allowed = (0, 1) if "--fail-on" in line else (0,)
        assert found.returncode in allowed, f"{shlex.join(smaller(each))}\n{found.stdout[-2000:]}{found.stderr[-2000:]}"
