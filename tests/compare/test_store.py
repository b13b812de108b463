"""The store of rows: nothing is lost, nothing is torn, nothing wrong gets in."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from normlab.compare.store import Store
from normlab.errors import NormLabError


def row(run: str = "a", **changes: Any) -> dict[str, Any]:
    facts = {
        "run": run, "scheme": "pre", "label": "pre", "lr": 1e-3, "seed": 1, "role": "tune", "state": "done",
        "reason": None, "metric": "val_loss", "value": 1.5, "loss": 1.5, "bits_per_byte": 2.1, "tokens": 4096,
        "steps": 8, "seconds": 1.0, "tokens_per_s": 4096.0, "peak_bytes": None, "device": "cpu",
        "versions": {"torch": "2"}, "config": {"lr": 1e-3}, "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:00:01+00:00",
    }  # fmt: skip
    return facts | changes


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.rows() == []
    # Python has half a surrogate pair for a byte of a file's name that is not UTF-8.
    odd = row(label="naïve | <b>\u2028\n", extra={"more": [1, None, "sur\udcff.txt"]})
    store.append(odd)
    assert store.rows() == [odd]
    assert store.path.read_bytes().count(b"\n") == 1


def test_the_last_row_of_a_run_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(row("a", state="failed", value=None, reason="killed"))
    store.append(row("b"))
    assert {r["run"]: r["state"] for r in store.rows()} == {"a": "failed", "b": "done"}
    store.append(row("a", value=1.25))
    assert store.rows()[0]["state"] == "done"
    assert [r["run"] for r in store.rows()] == ["a", "b"]
    assert store.rows()[0]["value"] == 1.25
    assert len(store.path.read_text().splitlines()) == 3


def test_every_cut_of_the_last_line_leaves_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(row("a"))
    first = store.path.stat().st_size
    store.append(row("b"))
    whole = store.path.read_bytes()
    for size in range(first + 1, len(whole) - 1, 7):
        store.path.write_bytes(whole[:size])
        with pytest.warns(UserWarning, match="torn"):
            assert [r["run"] for r in store.rows()] == ["a"]
        store.append(row("c"))
        assert [r["run"] for r in store.rows()] == ["a", "c"]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(row("a"))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    assert [r["run"] for r in store.rows()] == ["a"]
    store.append(row("b"))
    assert [r["run"] for r in store.rows()] == ["a", "b"]


@pytest.mark.parametrize("line", ["{not json", "[1]", "", '{"run": "a"}', "\x00\x00"])
def test_a_corrupt_line_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    store = Store(tmp_path)
    store.append(row("a"))
    good = store.path.read_text()
    store.path.write_text(good + line + "\n" + good)
    with pytest.raises(NormLabError, match="line 2"):
        store.rows()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", ""), ("run", 3), ("lr", 0.0), ("lr", float("nan")), ("lr", True), ("seed", 1.5), ("seed", -1),
        ("role", "test"), ("state", "running"), ("value", None), ("value", float("inf")), ("value", "1"),
        ("config", None), ("tokens", None), ("device", ""),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    store = Store(tmp_path)
    with pytest.raises(NormLabError, match=field):
        store.append(row(**{field: value}))
    missing = row()
    del missing[field]
    with pytest.raises(NormLabError, match=f"{field} is missing"):
        store.append(missing)
    assert not store.path.exists()


def test_a_failed_run_may_hold_anything_measured(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(row(state="failed", value=float("nan"), loss=float("inf"), reason="loss is NaN at step 3"))
    assert store.rows()[0]["loss"] == float("inf")


def _append_many(folder: str, writer: int, count: int) -> None:
    store = Store(folder)
    for k in range(count):
        # Rows longer than a page of memory: a write that is not whole would show.
        store.append(row(f"{writer}-{k}", reason="x" * 6000, state="failed", value=None))


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(str(tmp_path), w, 25)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    lines = Store(tmp_path).path.read_text().splitlines()
    assert sorted(json.loads(line)["run"] for line in lines) == sorted(f"{w}-{k}" for w in range(4) for k in range(25))


def test_a_writer_waits_while_another_holds_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(row("a"))
    before = store.path.read_bytes()
    with store.path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=store.append, args=(row("b"),))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert store.path.read_bytes() == before
    writer.join(60)
    assert [r["run"] for r in store.rows()] == ["a", "b"]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.append(row("a"))
    before = store.path.read_bytes()
    write = os.write
    # A disk that takes half of the row, then one that takes nothing.
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(NormLabError, match="only a part"):
        store.append(row("b"))
    assert store.path.read_bytes() == before

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NormLabError, match="No space left"):
        store.append(row("b"))
    assert store.path.read_bytes() == before
