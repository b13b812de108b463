"""Runs that are stuck, in a comparison: what their rows say, and that they have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normlab.compare import executor
from normlab.compare.comparison import compare, left
from normlab.compare.store import Row, Store
from normlab.train.monitor import stuck
from tests.compare import small
from tests.compare.here import Here
from tests.compare.small import configuration, losses


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge runs five steps after warm-up."""
    monkeypatch.setattr(executor, "ProcessPool", Here)
    monkeypatch.setattr(stuck, "PATIENCE", 5)


def hopeless(text: Path, **changes: Any) -> Any:
    """Rates at which nothing is learnt; warm-up takes one of twelve steps."""
    of_base = {"val_data": (), "val_fraction": 0.2} | changes.pop("of_base", {"stop_hopeless": True})
    return configuration(text, **({"lrs": (1e-9, 2e-9), "seeds": 1, "of_base": of_base} | changes))


def rows_of(config: Any, folder: Path) -> list[Row]:
    compare(config, folder, progress=False)
    return Store(folder).rows()


@pytest.mark.usefixtures("soon")
def test_stopped_runs_have_ended_and_say_why(text: Path, tmp_path: Path) -> None:
    config = hopeless(text)
    rows = rows_of(config, tmp_path)
    # Where every rate is stuck, a scheme is judged at the one that came furthest.
    assert {row["role"] for row in rows} == {"tune", "judge"}
    for row in rows:
        assert (row["state"], row["stuck"], row["steps"], row["value"]) == ("done", True, 6, row["loss"])
        assert row["reason"].startswith(f"stuck above the unigram entropy ({row['unigram_entropy']:.2f}): loss ")
        assert row["loss"] > row["unigram_entropy"] - 0.1
        assert row["tokens"] == 6 * small.LENGTH * small.BATCH
    assert left(config, tmp_path) == 0
    before = (tmp_path / "rows.jsonl").read_bytes()
    compare(config, tmp_path, progress=False)
    # They have not failed: they would be stuck again.
    compare(hopeless(text, repeat_failed=True), tmp_path, progress=False)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert all(len(steps) == 6 for steps in losses(tmp_path).values())


@pytest.mark.usefixtures("soon")
def test_judge_runs_are_stopped_too(text: Path, tmp_path: Path) -> None:
    rows = rows_of(hopeless(text, lrs=(1e-9,)), tmp_path)
    assert [(row["role"], row["stuck"], row["steps"]) for row in rows] == [("judge", True, 6)] * 2


@pytest.mark.usefixtures("soon")
def test_without_being_asked_they_go_on_and_are_marked(text: Path, tmp_path: Path) -> None:
    rows = rows_of(hopeless(text, lrs=(1e-9,), of_base={}), tmp_path)
    for row in rows:
        assert (row["state"], row["stuck"], row["steps"], row["reason"]) == ("done", True, small.SHORT, None)
        assert row["value"] == row["loss"] > row["unigram_entropy"] - 0.1
        assert 5.0 < row["first_loss"] < 7.0


@pytest.mark.full
def test_runs_that_learn_are_not_marked(text: Path, tmp_path: Path) -> None:
    for row in rows_of(hopeless(text, lrs=(1e-2,), of_base={"steps": small.LONG}), tmp_path):
        assert (row["state"], row["stuck"]) == ("done", False)
        assert row["value"] < row["unigram_entropy"] - 0.1


@pytest.mark.usefixtures("soon")
def test_a_comparison_of_version_0_1_goes_on(text: Path, tmp_path: Path) -> None:
    """Its compare.json has no such field, and its rows say nothing of it."""
    config = hopeless(text, lrs=(1e-9,), of_base={})
    rows_of(config, tmp_path)
    path = tmp_path / "compare.json"
    about = json.loads(path.read_text())
    del about["base"]["stop_hopeless"]
    path.write_text(json.dumps(about))
    kept = [{name: value for name, value in row.items() if name != "stuck"} for row in Store(tmp_path).rows()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    compare(config, tmp_path, progress=False)
    assert Store(tmp_path).rows() == kept


@pytest.mark.usefixtures("soon")
def test_the_terminal_says_so(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, of_base in (("asked", {"stop_hopeless": True}), ("not asked", {})):
        compare(hopeless(text, schemes=("pre", "post"), lrs=(1e-9,), of_base=of_base), tmp_path / name)
        row = Store(tmp_path / name).rows()[0]
        where = f"stuck above the unigram entropy ({row['unigram_entropy']:.2f})"
        assert f"pre, rate 1e-09, seed 0 (judge): loss {row['value']:.4f}, {where}\n" in capsys.readouterr().err


@pytest.mark.full
def test_in_processes_of_their_own(text: Path, tmp_path: Path) -> None:
    """With the real patience of three hundred steps."""
    config = hopeless(text, lrs=(1e-9,), of_base={"stop_hopeless": True, "steps": 320, "warmup": 0.0})
    assert {(row["stuck"], row["steps"]) for row in rows_of(config, tmp_path)} == {(True, 300)}
