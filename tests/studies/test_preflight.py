"""Before a study starts: a fault in the last of several is one line before the first has trained anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from normlab.errors import NormLabError
from normlab.studies import command, preflight
from normlab.studies.study import Study, load_study
from tests.compare.small import held_out, write_text
from tests.studies.rows import CLAIM, TINY, row, write_study

NOT_RUN = CLAIM + 'kind = "count"\nscheme = "peri"\nat_most = 0.0\n'


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_unnamed_copy", lambda: False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the studies that were started; none of them runs anything."""
    names: list[str] = []

    def start(study: Study, *_args: Any, **_options: Any) -> int:
        names.append(study.name)
        return 0

    monkeypatch.setattr("normlab.studies.run.run_study", start)
    return names


def call(tmp_path: Path, *, text: str = TINY, **settings: Any) -> int:
    """A study that could start, and after it one with these settings."""
    good = tmp_path / "text"
    if not good.exists():
        write_text(good)
    data = {"data": [good.name], "val_data": [held_out(good).name]}
    write_study(tmp_path / "studies", **data)
    write_study(tmp_path / "studies", text, "second", **(data | settings))
    studies = [load_study(name, tmp_path / "studies") for name in ("tiny", "second")]
    return command.run(studies, tmp_path / "results", minutes=None, overrides={}, command=[], data_dir=good.parent)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": ["books-*.jsonl.xz"]}, "second: no file matches 'books-*.jsonl.xz'"),
        ({"val_data": ["val.jsonl.xz"]}, "second: no file matches 'val.jsonl.xz'"),
        ({"val_sets": ["books=books.jsonl.xz"]}, "second: no file matches 'books.jsonl.xz'"),
        ({"tokenizer": "tokenizers/bpe.json.xz"}, "tokenizer tokenizers/bpe.json.xz: cannot be read"),
        ({"text": TINY + NOT_RUN}, "unknown scheme in the rule of it"),
        ({"text": TINY.replace("depth = 2", "dept = 2")}, "unknown setting in second, main 'dept'"),
        ({"text": TINY.replace('device = "cpu"', 'device = "cuda:99"')}, "GPU"),
    ],
)
def test_what_the_last_study_lacks_is_said_before_the_first_starts(settings, words, tmp_path, started):
    with pytest.raises(NormLabError) as error:
        call(tmp_path, **settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert started == []
    assert not (tmp_path / "results").exists()


def test_a_study_that_is_planned_for_a_gpu_does_not_start_on_a_cpu_by_itself(tmp_path, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    planned = TINY.replace('device = "cpu"\n', "").replace("[settings]", "gpu_minutes = 5\n[settings]")
    with pytest.raises(NormLabError, match="second: torch sees no GPU here, and about 5 minutes of one are planned"):
        call(tmp_path, text=planned)
    assert call(tmp_path, text=planned, device="cpu") == 0
    assert started == ["tiny", "second"]


def test_rows_of_another_rule_are_refused_before_anything_starts(tmp_path, started):
    stored = tmp_path / "results/second/main/rows.jsonl"
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps(row("pre", 0, 1.0, rule="another")) + "\n")
    with pytest.raises(NormLabError, match="rule of second has changed since 1 rows"):
        call(tmp_path)
    assert started == []


def test_results_that_cannot_be_written_are_found_first(tmp_path, started, monkeypatch):
    (tmp_path / "results/second/main").mkdir(parents=True)
    locked = tmp_path / "results/second/main/rows.jsonl"
    locked.touch()
    may = os.access
    # The permissions themselves say nothing to root.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and may(path, mode))
    with pytest.raises(NormLabError, match=r"rows\.jsonl cannot be written to"):
        call(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "is_unnamed_copy", lambda: False)
    with pytest.raises(NormLabError, match="is a file where results were to be stored"):
        preflight.check_ready(load_study("tiny", tmp_path / "studies"), locked)
    assert started == []


def test_rows_must_be_able_to_name_their_code(tmp_path, started, monkeypatch):
    monkeypatch.setattr(preflight, "is_unnamed_copy", lambda: True)
    with pytest.raises(NormLabError, match="set NORMLAB_COMMIT to it"):
        call(tmp_path)
    assert started == []


def test_what_is_there_already_is_said(tmp_path, started, capsys):
    """A results folder that is not the one of the last slice would have every run made again."""
    assert call(tmp_path) == 0
    assert started == ["tiny", "second"]
    assert f"second: no rows yet in {tmp_path / 'results' / 'second'}" in capsys.readouterr().out
