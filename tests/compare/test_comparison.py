"""Comparisons from end to end: every run a row, the same numbers however often it was stopped, killed or grown."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab.compare import executor, session
from normlab.compare.bracket import Bracket
from normlab.compare.comparison import compare, left
from normlab.compare.outcome import outcome
from normlab.compare.statistics import rank_schemes
from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.ladders.ladder import run_ladder
from normlab.train.trainer import train
from normlab.utils.files import write_json
from normlab.utils.locks import hold
from normlab.utils.text import counted
from tests.compare import small
from tests.compare.small import configuration, has_checkpoint, in_process, losses, values, wait_until
from tests.ladders import small as ladders


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A finished comparison that may be changed."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_places: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(executor, "ProcessPool", refuse)


def test_a_sink_that_is_not_installed_leaves_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    of_base = {"sinks": ("wandb",)}
    with pytest.raises(NormLabError, match="wandb is not installed"):
        compare(configuration(text, of_base=of_base), tmp_path / "compared", progress=False)
    with pytest.raises(NormLabError, match="wandb is not installed"):
        run_ladder(ladders.configuration(text, of_base=of_base), tmp_path / "ladder", progress=False)
    assert not any(tmp_path.glob("[cl]*"))


def test_every_run_is_a_row(whole: Path, text: Path) -> None:
    rows = Store(whole).rows()
    assert [row["role"] for row in rows] == ["tune"] * 4 + ["judge"] * 4
    assert all(row["state"] == "done" and row["value"] == row["loss"] for row in rows)
    assert {row["steps"] for row in rows} == {small.SHORT}
    tune, judge = ({row["seed"] for row in rows if row["role"] == role} for role in ("tune", "judge"))
    assert (tune, judge) == ({1000}, {0, 1})
    for row in rows:
        assert row["config"] == configuration(text).run(row["scheme"], row["lr"], row["seed"]).to_dict()
        assert (whole / "runs" / row["run"] / "model.safetensors").is_file()
    assert left(configuration(text), whole) == 0


def test_a_row_holds_what_the_same_run_gives_alone(whole: Path, text: Path, tmp_path: Path) -> None:
    row = next(row for row in Store(whole).rows() if (row["scheme"], row["role"], row["seed"]) == ("post", "judge", 1))
    alone = train(configuration(text).run("post", row["lr"], 1), tmp_path / "run", progress=False)
    assert row["value"] == alone.loss
    assert row["bits_per_byte"] == alone.scores["bits_per_byte"]
    assert row["tokens"] == alone.tokens


def test_schemes_are_judged_at_the_rate_that_their_tune_runs_like_best(whole: Path) -> None:
    rows = Store(whole).rows()
    for scheme in ("pre", "post"):
        tune = {row["lr"]: row["value"] for row in rows if (row["scheme"], row["role"]) == (scheme, "tune")}
        judged = {row["lr"] for row in rows if (row["scheme"], row["role"]) == (scheme, "judge")}
        assert judged == {min(tune, key=lambda lr: tune[lr])}


def test_compare_json_says_what_was_compared(whole: Path, text: Path) -> None:
    about = json.loads((whole / "compare.json").read_text())
    assert about["schemes"] == ["pre", "post"]
    assert (about["baseline"], about["metric"], about["level"]) == ("pre", "val_loss", 0.95)
    assert about["command"] == ["normlab", "compare"]
    assert (about["corpus"]["train"]["documents"], about["corpus"]["val"]["documents"]) == (10, 1)
    assert about["versions"].keys() >= {"normlab", "torch", "python"}


@pytest.mark.usefixtures("no_process")
def test_what_is_finished_is_only_read(copy: Path, text: Path) -> None:
    before = (copy / "rows.jsonl").read_bytes()
    standings = compare(configuration(text), copy, progress=False)
    assert (copy / "rows.jsonl").read_bytes() == before
    assert {own.scheme for own in standings} == {"pre", "post"}
    assert all(len(own.finished) == 2 for own in standings)


@pytest.mark.full
def test_two_processes_give_the_numbers_of_one(whole: Path, text: Path, tmp_path: Path) -> None:
    compare(configuration(text, workers=2), tmp_path, progress=False)
    assert values(tmp_path) == values(whole)
    assert losses(tmp_path) == losses(whole)


@pytest.mark.full
def test_it_grows_by_seeds_and_schemes(copy: Path, whole: Path, text: Path) -> None:
    grown = configuration(text, seeds=3, schemes=("peri", "pre", "post"))
    assert left(grown, copy) == outcome(grown, copy).left == 2 + 2 + 3
    assert outcome(grown, copy).exit_code == 130
    compare(grown, copy, progress=False)
    after = values(copy)
    assert after.items() >= values(whole).items()
    assert len(after) == 8 + 7
    assert json.loads((copy / "compare.json").read_text())["seeds"] == 3


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": 1}, "its seeds is 2, not 1"),
        ({"lrs": (1e-3, 5e-3)}, "its lrs have 0.01"),
        ({"schemes": ("pre", "peri")}, "its schemes have post"),
        ({"baseline": "post"}, "its baseline is 'pre', not 'post'"),
        ({"level": 0.9}, "its level is 0.95, not 0.9"),
        ({"of_base": {"weight_decay": 0.0}}, "its weight_decay is 0.1, not 0.0"),
        ({"of_base": {"depth": 3}}, "its depth is 2, not 3"),
        ({"of_base": {"steps": 13}}, "its tokens is 1536, not 1664"),
    ],
)
def test_another_comparison_in_the_same_folder_is_refused(
    copy: Path, text: Path, changes: dict[str, Any], words: str
) -> None:
    about = (copy / "compare.json").read_bytes()
    with pytest.raises(NormLabError) as error:
        compare(configuration(text, **changes), copy, progress=False)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert (copy / "compare.json").read_bytes() == about


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("file", "what"), [("config.json", "a run or a model"), ("ladder.json", "a ladder")])
def test_a_folder_of_other_results_is_refused(file: str, what: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(NormLabError, match=rf"holds {what} \({file}\); choose another folder with --out"):
        compare(configuration(text), tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [file]


@pytest.mark.usefixtures("no_process")
def test_what_decides_no_result_may_change(copy: Path, text: Path) -> None:
    compare(configuration(text, of_base={"saves": 0, "keep": 1}, workers=3, repeat_failed=True), copy, progress=False)


def test_changed_text_is_refused_once_a_run_has_begun(tmp_path: Path) -> None:
    text, folder = small.write_text(tmp_path / "text"), tmp_path / "out"
    config = configuration(text)
    compare(config, folder, progress=False, minutes=1e-9)
    (text / "0.txt").write_text("something else")
    compare(config, folder, progress=False, minutes=1e-9)
    run = folder / "runs" / "begun"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (text / "0.txt").write_text("something else again")
    with pytest.raises(NormLabError, match="its data has changed"):
        compare(config, folder, progress=False, minutes=1e-9)


def test_a_broken_compare_json_is_named(copy: Path, text: Path) -> None:
    (copy / "compare.json").write_text("{}")
    with pytest.raises(NormLabError, match=r"compare\.json cannot be read"):
        compare(configuration(text), copy, progress=False)


@pytest.mark.full
def test_a_failed_run_is_a_row_and_the_rest_go_on(text: Path, tmp_path: Path) -> None:
    # Without norms the state of a deep stack grows without bound at a large rate.
    config = configuration(
        text, schemes=("none", "pre"), lrs=(1e-3, 100.0), seeds=1,
        of_base={"depth": 12, "trouble": "stop", "clip": math.inf, "warmup": 0.0},
    )  # fmt: skip
    standings = compare(config, tmp_path, progress=False)
    rows = Store(tmp_path).rows()
    failed = [row for row in rows if row["state"] == "failed"]
    assert ("none", 100.0) in {(row["scheme"], row["lr"]) for row in failed}
    assert all(row["value"] is None and row["reason"] and "\n" not in row["reason"] for row in failed)
    assert all(row["role"] == "tune" for row in failed)
    assert {own.scheme: own.lr for own in standings}["none"] == 1e-3
    assert left(config, tmp_path) == 0
    assert (outcome(config, tmp_path).failed, outcome(config, tmp_path).exit_code) == (len(failed), 1)
    assert outcome(config, tmp_path).lines == [f"{counted(len(failed), 'run')} failed; --repeat-failed tries again"]
    # What has failed has ended, unless the user says otherwise.
    compare(config, tmp_path, progress=False)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)


@pytest.mark.full
def test_what_the_user_can_mend_is_no_failed_run(text: Path, tmp_path: Path) -> None:
    config = configuration(text, **small.long())
    first = config.plan().runnable([])[0]
    # Something that is no checkpoint stands where one was.
    run = tmp_path / "runs" / first.name
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    write_json(run / "config.json", {"config": first.config.to_dict(), "versions": {}, "device": "CPU"})
    with pytest.raises(NormLabError, match="no whole checkpoint"):
        compare(config, tmp_path, progress=False)
    assert values(tmp_path) == {}


@pytest.mark.full
def test_a_script_that_forgets_to_guard_its_call_is_told_so(text: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from normlab.compare import compare\nfrom tests.compare.small import configuration\n"
        f"compare(configuration({str(text)!r}), {str(tmp_path / 'out')!r}, progress=False)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(small.ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "a worker cannot start" in done.stderr.splitlines()[-1]
    assert values(tmp_path / "out") == {}


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_as_a_whole_it_goes_on_to_the_same_numbers(text: Path, tmp_path: Path, long: Path, workers: int) -> None:
    config = small.long(workers=workers)
    process = in_process(text, tmp_path, config, progress=False)
    wait_until(lambda: has_checkpoint(tmp_path), process)
    process.kill()
    process.communicate()
    assert len(values(tmp_path)) < 2
    compare(configuration(text, **config), tmp_path, progress=False)
    assert values(tmp_path) == values(long)
    assert losses(tmp_path) == losses(long)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_to_the_same_numbers(
    text: Path, tmp_path: Path, long: Path, number: signal.Signals
) -> None:
    config = small.long(of_base={"steps": small.LONG, "saves": 0})
    process = in_process(text, tmp_path, config)
    wait_until(lambda: any(steps for steps in losses(tmp_path).values()), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert "stopped: 0 of 2 runs have ended; the same command goes on from here" in errors
    assert values(tmp_path) == {}
    # Nothing but the request has made it save.
    assert has_checkpoint(tmp_path)
    compare(configuration(text, **config), tmp_path, progress=False)
    assert list(values(tmp_path).values()) == list(values(long).values())


@pytest.mark.full
def test_after_its_minutes_it_stops_and_a_later_call_goes_on(
    text: Path, tmp_path: Path, long: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(text, **small.long())
    with monkeypatch.context() as patch:
        # A clock on which the hour is over as soon as a run is under way.
        clock = SimpleNamespace(monotonic=lambda: 3600.0 * any(losses(tmp_path).values()))
        patch.setattr(session, "time", clock)
        assert compare(config, tmp_path, minutes=59.0) == []
    assert "stopped: 0 of 2 runs have ended; the same command goes on from here" in capsys.readouterr().err
    assert has_checkpoint(tmp_path)
    assert left(config, tmp_path) == 2
    assert len(compare(config, tmp_path, minutes=59.0)) == 2
    assert values(tmp_path) == values(long)
    assert losses(tmp_path) == losses(long)


def kill_worker(folder: Path) -> str:
    """Kill the process of the run under way, as the system does where memory runs out; returns the run's name."""
    lock = next(folder.glob("runs/*/lock"))
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    return lock.parent.name


@pytest.mark.full
def test_a_killed_worker_is_started_again_from_its_checkpoint(text: Path, tmp_path: Path, long: Path) -> None:
    process = in_process(text, tmp_path, small.long())
    wait_until(lambda: has_checkpoint(tmp_path), process)
    name = kill_worker(tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert (
        "killed (SIGKILL), perhaps because memory ran out; starting again from its last checkpoint (1 of 2)" in errors
    )
    assert [row["state"] for row in Store(tmp_path).rows()] == ["done", "done"]
    assert values(tmp_path) == values(long)
    assert losses(tmp_path) == losses(long)
    events = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
    assert [event["what"] for event in events if event["kind"] == "event" and event["what"] == "resume"] == ["resume"]


@pytest.mark.full
def test_a_run_killed_too_often_is_interrupted_and_tried_again_by_the_next_call(
    text: Path, tmp_path: Path, long: Path
) -> None:
    process = in_process(text, tmp_path, small.long(retries=0), progress=False)
    wait_until(lambda: has_checkpoint(tmp_path), process)
    name = kill_worker(tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    killed, done = Store(tmp_path).rows()
    assert (killed["run"], killed["state"], killed["value"]) == (name, "interrupted", None)
    assert "killed (SIGKILL)" in killed["reason"]
    assert killed["steps"] > 0
    assert done["value"] == values(long)[done["run"]]
    config = configuration(text, **small.long(retries=0))
    found = outcome(config, tmp_path)
    assert (found.runnable, found.left, found.failed, found.interrupted, found.exit_code) == (0, 1, 0, 1, 1)
    # Charged to nobody: the scheme has no judge run, it has not failed.
    (standing,) = (own for own in rank_schemes(Store(tmp_path).rows(), "pre") if own.interrupted)
    assert (standing.verdict, standing.failed) == ("not judged", 0)
    compare(config, tmp_path, progress=False)
    assert values(tmp_path) == values(long)
    assert outcome(config, tmp_path).exit_code == 0


@pytest.mark.full
def test_rates_that_are_searched_end_inside_those_tried_and_resume(text: Path, tmp_path: Path) -> None:
    config = configuration(text, lrs="auto", seeds=1, of_base={"steps": 8, "evals": 1, "saves": 0}, schemes=("pre",))
    compare(config, tmp_path, progress=False)
    rows = Store(tmp_path).rows()
    tune = {row["lr"]: row["value"] for row in rows if row["role"] == "tune"}
    (judge,) = (row for row in rows if row["role"] == "judge")
    assert judge["lr"] == min(tune, key=lambda lr: tune[lr])
    assert isinstance(config.bracket, Bracket)
    assert min(tune) < judge["lr"] < max(tune) or judge["lr"] in config.bracket.limits
    about = json.loads((tmp_path / "compare.json").read_text())
    assert about["lrs"] == "auto"
    assert about["rates"]["first"] == list(config.bracket.first)
    # From some of the rows the same runs follow.
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:2]))
    compare(config, tmp_path, progress=False)
    assert values(tmp_path) == {row["run"]: row["value"] for row in rows}
    # A search goes on from rates of its grid that were listed before.
    (tmp_path / "compare.json").write_text(json.dumps(about | {"lrs": sorted(tune)}))
    compare(config, tmp_path, progress=False)
    assert json.loads((tmp_path / "compare.json").read_text())["lrs"] == "auto"
    assert values(tmp_path) == {row["run"]: row["value"] for row in rows}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("lrs", ["auto", (1e-3, 1e-2)])
def test_lists_after_a_search_and_searches_off_its_grid_are_refused(copy: Path, text: Path, lrs: Any) -> None:
    about = json.loads((copy / "compare.json").read_text())
    (copy / "compare.json").write_text(json.dumps(about | {"lrs": [1e-3, 1e-2] if lrs == "auto" else "auto"}))
    with pytest.raises(NormLabError, match="its lrs is"):
        compare(configuration(text, lrs=lrs), copy, progress=False)


@pytest.mark.usefixtures("no_process")
def test_a_list_that_was_widened_stays_so(copy: Path, text: Path) -> None:
    """Rates beyond it were tried, and one of them may have been judged."""
    about = json.loads((copy / "compare.json").read_text())
    (copy / "compare.json").write_text(json.dumps(about | {"widen_rates": True}))
    with pytest.raises(NormLabError, match="its rates are widened beyond the list"):
        compare(configuration(text), copy, progress=False)


@pytest.mark.full
def test_a_second_process_is_refused(text: Path, tmp_path: Path) -> None:
    with hold(tmp_path / "lock"):
        process = in_process(text, tmp_path, small.long(), progress=False)
        _, errors = process.communicate(timeout=200)
    assert f"{tmp_path} is in use by process {os.getpid()}" in errors
    assert not (tmp_path / "compare.json").exists()


def test_what_cannot_be_is_said_in_one_line(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NormLabError, match="minutes must be positive"):
        compare(configuration(text), tmp_path, minutes=0.0)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "old").mkdir()
    for name in ("new", "old"):
        with pytest.raises(NormLabError, match="no text in it"):
            compare(configuration(tmp_path / "empty.txt", of_base={"val_data": ()}), tmp_path / name)
    assert not (tmp_path / "new").exists()  # what is refused makes no folder
    assert (tmp_path / "old").is_dir()
    with pytest.raises(NormLabError, match="cannot make"):
        compare(configuration(text), tmp_path / "file")
    for world in ("2", "x"):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(NormLabError, match="without torchrun"):
            compare(configuration(text), tmp_path)
