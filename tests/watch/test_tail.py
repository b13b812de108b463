"""Files that another process writes: read once, half lines waited for, rewritten and replaced files read again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from normlab.watch import tail as tails
from normlab.watch.tail import JsonFile, JsonLinesTail
from tests.watch.made import step, write


class Reader:
    """A tail, and all that it has passed on since its last restart."""

    def __init__(self, path: Path):
        self.tail, self.steps, self.restarts = JsonLinesTail(path), list[Any](), 0

    def poll(self) -> bool:
        return self.tail.poll(lambda record: self.steps.append(record.get("step")), self._restart)

    def _restart(self) -> None:
        self.steps, self.restarts = [], self.restarts + 1


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_only_what_is_new_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(log)
    assert not reader.poll()
    write(log, map(step, range(1, 2001)))
    assert reader.poll()
    assert not reader.poll()
    opened: list[int] = []
    real = Path.open

    class Counted:
        """A file that says how much of it was read."""

        def __init__(self, file: Any):
            self._file = file

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: Any) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                found = getattr(self._file, name)(*arguments)
                opened.append(len(found) if isinstance(found, bytes) else 0)
                return found

            return call

    write(log, [step(2001)])
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: Counted(real(path, *a, **k)))
    assert reader.poll()
    assert reader.steps == list(range(1, 2002))
    assert reader.restarts == 0
    assert 0 < sum(opened) < 1000 < log.stat().st_size


def test_half_a_line_waits_for_its_end(log: Path) -> None:
    whole = json.dumps(step(1)) + "\n"
    reader = Reader(log)
    for end in (1, 20, len(whole) - 2, len(whole) - 1, len(whole)):
        log.write_text(whole[:end])
        os.utime(log, ns=(end, end))
        assert reader.poll()
        assert reader.steps == ([1] if end == len(whole) else [])
    assert reader.restarts == 0


def test_a_resumed_run_that_dropped_its_last_records_is_read_again(log: Path) -> None:
    reader = Reader(log)
    write(log, map(step, range(1, 11)))
    reader.poll()
    # Shorter first, as `truncate_after` leaves it; then, in the second case, already longer than before.
    log.write_text("".join(json.dumps(step(k)) + "\n" for k in range(1, 6)))
    assert reader.poll()
    assert reader.steps == [1, 2, 3, 4, 5]
    log.write_text("".join(json.dumps(step(k, 9.0)) + "\n" for k in range(1, 31)))
    assert reader.poll()
    assert reader.steps == list(range(1, 31))
    assert reader.restarts == 2


def test_a_copy_that_replaces_the_file_is_read_on_from_where_it_was(log: Path) -> None:
    """What rsync does: a new file under the old name, the same records and more."""
    reader = Reader(log)
    write(log, map(step, range(1, 11)))
    reader.poll()
    copy = log.with_name("copy")
    write(copy, map(step, range(1, 16)))
    os.replace(copy, log)
    assert reader.poll()
    assert reader.steps == list(range(1, 16))
    assert reader.restarts == 0


def test_a_file_that_is_gone_leaves_what_was_read(log: Path) -> None:
    reader = Reader(log)
    write(log, [step(1)])
    reader.poll()
    log.unlink()
    assert not reader.poll()
    assert reader.steps == [1]
    write(log, [step(7)])
    assert reader.poll()
    assert reader.steps == [7]


@pytest.mark.parametrize("junk", [b"\0" * 64, b"[1, 2]", b"null", b"{", b'\xff\xfe{"a"', b"[" * 100_000])
def test_lines_that_are_no_record_are_skipped(log: Path, junk: bytes) -> None:
    log.write_bytes(json.dumps(step(1)).encode() + b"\n" + junk + b"\n" + json.dumps(step(2)).encode() + b"\n")
    reader = Reader(log)
    assert reader.poll()
    assert reader.steps == [1, 2]


def test_a_line_without_end_is_passed_over(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_LONGEST", 1000)
    log.write_bytes(b"x" * 3500 + b"\n" + json.dumps(step(1)).encode() + b"\n")
    reader = Reader(log)
    assert reader.poll()
    assert reader.steps == [1]


def test_a_torn_json_file_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    file = JsonFile(path)
    assert not file.poll()
    path.write_text('{"state": "running"}')
    assert file.poll()
    assert not file.poll()
    path.write_text('{"state": "do')
    assert not file.poll()
    assert file.content == {"state": "running"}
    path.write_text('{"state": "done"}')
    assert file.poll()
    assert file.content == {"state": "done"}
