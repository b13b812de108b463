"""Runs found in folders, their states in words, and answers that hold only what has changed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.watch.discover import check_folder, find_runs
from normlab.watch.status import SILENCE, patience, status
from normlab.watch.watched_run import WatchedRun
from normlab.watch.watcher import Watcher
from tests.watch import made


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_runs_are_found_and_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    made.run(tmp_path / "first/runs/peri-1")
    made.run(tmp_path / "first/runs/pre-1")
    assert list(find_runs(tmp_path / "first")) == ["peri-1", "pre-1"]
    made.write(tmp_path / "loop/profiles.jsonl", [made.step(1)])
    made.run(tmp_path / "first/runs/pre-1/checkpoints/inner")
    made.run(tmp_path / ".hidden/run")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    assert list(find_runs(tmp_path)) == ["first/runs/peri-1", "first/runs/pre-1", "loop"]
    assert find_runs(tmp_path / "loop") == {"loop": tmp_path / "loop"}


def test_profiles_beside_runs_hide_none(tmp_path: Path) -> None:
    made.write(tmp_path / "profiles.jsonl", [made.step(1)])
    made.run(tmp_path / "runs/a")
    assert list(find_runs(tmp_path)) == [tmp_path.name, "runs/a"]


def test_a_wrong_folder_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in [("nowhere", "does not exist"), ("file", "is a file"), (".", "holds no runs")]:
        with pytest.raises(NormLabError, match=message):
            check_folder(tmp_path / path)


STUCK = {"stuck": True, "steps": 9, "loss": 2.0, "unigram_entropy": 3.12}


@pytest.mark.parametrize(
    ("stored", "state", "words"),
    [
        ({"state": "done", "result": {"stuck": False}}, "finished", "finished"),
        ({"state": "done", "result": {"stuck": True}}, "stuck", "finished, but stuck"),
        ({"state": "done", "result": STUCK | {"stuck_at": 9}}, "stuck", "finished, but stuck"),
        ({"state": "done", "result": STUCK | {"stuck_at": 7}}, "stuck", "finished, but was stuck"),
        # Of before 0.2, without the step: its last loss says it.
        ({"state": "done", "result": STUCK | {"stuck_at": None}}, "stuck", "finished, but was stuck"),
        ({"state": "done", "result": STUCK | {"stuck_at": None, "loss": 3.1}}, "stuck", "finished, but stuck"),
        ({"state": "stuck", "reason": "why"}, "stuck", "stuck, stopped early"),
        ({"state": "stopped", "reason": "why"}, "stopped", "stopped"),
        ({"state": "failed", "result": {"diverged": 7}}, "diverged", "diverged at step 7"),
        ({"state": "failed", "result": "odd"}, "failed", "failed"),
        ({"state": "running"}, "training", "training"),
        ({}, "training", "training"),
    ],
)
def test_states_in_words(stored: dict, state: str, words: str) -> None:
    found = status(stored, stuck=None, empty=False, quiet=1.0, patience=SILENCE)
    assert (found.state, found.words) == (state, words)
    assert found.reason == stored.get("reason", "")


def test_a_run_in_training_may_be_stuck_silent_or_not_begun() -> None:
    assert status({}, stuck="at 3.12", empty=False, quiet=1.0, patience=9.0).words == "stuck, still training"
    assert status({}, stuck=None, empty=True, quiet=1.0, patience=9.0).state == "starting"
    assert status({}, stuck=None, empty=False, quiet=600.0, patience=9.0).words == "no new line for 10 min"
    assert status({"state": "done"}, stuck=None, empty=False, quiet=600.0, patience=9.0).state == "finished"
    assert patience(None, 0.0) == SILENCE
    assert patience(20.0, 0.0) == 600.0
    assert patience(None, 300.0) == 900.0


def test_a_run_that_was_stuck_and_has_recovered_is_not_called_stuck(tmp_path: Path) -> None:
    stuck = made.event(150, "stuck", "stuck at the unigram entropy (3.12): loss 3.10 after 150 steps") | {"limit": 3.02}
    records = [*map(made.step, range(1, 151)), made.evaluation(150, 3.1), stuck]
    folder = made.run(tmp_path / "run", records, state="running")

    def words(*records: dict) -> str:
        made.write(folder / "metrics.jsonl", records)
        watched = WatchedRun(folder)
        watched.poll()
        return watched.status.words

    assert words() == "stuck, still training"
    assert words(made.evaluation(200, 2.9)) == "was stuck, training"
    assert words(made.evaluation(250, 3.05)) == "stuck, still training"
    assert words(made.evaluation(300, math.nan)) == "stuck, still training"
    assert words(made.evaluation(350, 2.0)) == "was stuck, training"
    # An evaluation that is not finite says nothing: the training loss alone has found the run stuck again.
    assert words(made.evaluation(400, math.nan), stuck | {"step": 400}) == "stuck, still training"


def test_the_last_line_is_timed_by_what_was_seen_not_by_another_clock(tmp_path: Path) -> None:
    wall, clock = Clock(), Clock()
    folder = made.run(tmp_path / "a", [made.step(1)], state="running")
    log = folder / "metrics.jsonl"
    # The machine that writes is an hour ahead: its file comes from the future.
    os.utime(log, (wall.now + 3600, wall.now + 3600))
    run = WatchedRun(folder, wall=wall, clock=clock)
    run.poll()
    assert run.quiet == 0.0
    clock.now += 30
    assert run.quiet == 30.0
    made.write(log, [made.step(2)])
    run.poll()
    assert run.quiet == 0.0
    clock.now += SILENCE + 1
    assert run.status.state == "silent"
    # A file that was old when it was first seen is as old as it says.
    os.utime(log, (wall.now - 50, wall.now - 50))
    late = WatchedRun(folder, wall=wall, clock=clock)
    late.poll()
    assert late.quiet == 50.0


def test_a_run_that_was_killed_before_its_first_line_is_silent(tmp_path: Path) -> None:
    folder = made.run(tmp_path / "run", state="running", step=0)
    for name in ("config.json", "status.json", "metrics.jsonl"):
        os.utime(folder / name, (1000.0, 1000.0))
    (folder / "metrics.jsonl").unlink()

    def words(now: float) -> str:
        watched = WatchedRun(folder, wall=lambda: now)
        watched.poll()
        return watched.status.words

    assert words(1010.0) == "starting"
    assert words(1000.0 + 2 * 3600) == "no new line for 2.0 h"
    made.write(folder / "metrics.jsonl", [made.step(1)])
    os.utime(folder / "metrics.jsonl", (8000.0, 8000.0))
    assert words(8010.0) == "training"


def test_a_folder_that_is_synchronised_every_few_minutes_is_not_silent(tmp_path: Path) -> None:
    clock = Clock()
    folder = made.run(tmp_path / "a", [made.step(1)], state="running")
    run = WatchedRun(folder, clock=clock)
    run.poll()
    for number in (2, 3):
        clock.now += 300
        made.write(folder / "metrics.jsonl", [made.step(number)])
        run.poll()
    clock.now += 300
    assert run.status.state == "training"


def test_answers_hold_what_has_changed_since(tmp_path: Path) -> None:
    clock = Clock()
    watcher = Watcher(made.zoo(tmp_path), clock=clock)
    first = watcher.answer()
    assert {run["name"]: run["status"]["state"] for run in first["runs"]} == {
        "diverged": "diverged", "finished": "finished", "new": "starting", "stopped": "stopped", "stuck": "stuck",
        "training": "training",
    }  # fmt: skip
    assert len(first["changed"]) == 6
    clock.now += 2
    same = watcher.answer(first["epoch"], first["version"])
    assert same["changed"] == {}
    made.write(tmp_path / "runs/training/metrics.jsonl", [made.step(201)])
    clock.now += 2
    after = watcher.answer(same["epoch"], same["version"])
    number = next(run["id"] for run in after["runs"] if run["name"] == "training")
    assert list(after["changed"]) == [str(number)]
    assert after["changed"][str(number)]["curve"]["step"][-1] == 201
    # Another server's version says nothing here.
    assert len(watcher.answer("other", after["version"])["changed"]) == 6
    json.dumps(after, allow_nan=False)


def test_new_runs_appear_and_a_lost_mount_forgets_none(tmp_path: Path) -> None:
    clock = Clock()
    root = tmp_path / "all"
    made.run(root / "a", [made.step(1)])
    watcher = Watcher(root, clock=clock)
    assert [line.name for line in watcher.lines()] == ["a"]
    made.run(root / "b", [made.step(1)])
    clock.now += 10
    assert [line.name for line in watcher.lines()] == ["a", "b"]
    root.rename(tmp_path / "away")
    clock.now += 10
    assert [line.name for line in watcher.lines()] == ["a", "b"]


def test_a_line_has_what_a_person_asks_for(tmp_path: Path) -> None:
    lines = {line.name: line for line in Watcher(made.zoo(tmp_path)).lines()}
    training = lines["training"]
    assert (training.progress, training.share, training.left) == ("200 of 400", 0.5, "20 s left")
    assert (training.validation, training.also) == ("1.9000", "bits per byte 2.7411")
    assert training.speed == "7.3k"
    assert lines["diverged"].alarms == "one failure, one warning"
    assert lines["new"].quiet == "–"
    made.run(tmp_path / "runs/nan", [made.step(1) | {"loss": None}])
    assert next(line for line in Watcher(tmp_path).lines() if line.name == "nan").loss == "not finite"
