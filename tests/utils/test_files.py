"""Files are whole or absent; what went wrong is one line."""

from __future__ import annotations

import errno
import hashlib
import math
import os

import pytest

from normlab.errors import NormLabError
from normlab.utils import files


@pytest.mark.parametrize("data", ["grüße\n", "", b"\x00\xff", b"x" * 3_000_001])
def test_what_is_written_is_read_back(tmp_path, data):
    path = tmp_path / "file"
    path.write_text("before")
    files.write_atomically(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert os.listdir(tmp_path) == ["file"]


def test_others_may_read_as_the_umask_says(tmp_path):
    mask = os.umask(0o022)
    try:
        files.write_atomically(tmp_path / "file", "x")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def write_privately(path) -> None:
    """As safetensors does: a private temporary file takes the place of the one that is there."""
    other = path.with_name("private")
    os.close(os.open(other, os.O_CREAT | os.O_WRONLY, 0o600))
    os.replace(other, path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_private_temporary_file_becomes_readable_as_the_umask_says(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with files.replacing(tmp_path / "weights") as part:
            write_privately(part)
        with files.replacing_folder(tmp_path / "model") as part:
            (part / "inside").mkdir()
            write_privately(part / "weights")
            write_privately(part / "inside" / "weights")
    finally:
        os.umask(before)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in written} == {mode}
    assert sorted(path.name for path in written) == ["weights"] * 3


@pytest.mark.parametrize(
    ("function", "code"), [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EDQUOT)]
)
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, function, code):
    path = tmp_path / "status.json"
    files.write_json(path, {"step": 1})

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(NormLabError, match=f"cannot write {path}: {os.strerror(code)}; ") as caught:
        files.write_json(path, {"step": 2})
    assert "\n" not in str(caught.value)
    assert files.read_json(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["status.json"]


def write_half(path, error: BaseException) -> None:
    with files.replacing(path) as part:
        part.write_bytes(b"half")
        raise error


def test_an_interrupted_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "file", KeyboardInterrupt())
    assert not os.listdir(tmp_path)


def test_a_full_disk_says_what_to_try(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(NormLabError, match="No space left on device; free some space"):
        write_half(tmp_path / "file", full)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("place", ["absent/file", "file/file"])
def test_a_place_that_is_none_is_named(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(NormLabError, match=f"cannot write .*{place}: .*; check the path"):
        files.write_atomically(tmp_path / place, "x")


def test_json_keeps_what_python_knows(tmp_path):
    path = tmp_path / "state.json"
    files.write_json(path, {"best": math.inf, "bad": [math.nan], "third": 0.1 + 0.2, "none": None})
    back = files.read_json(path)
    assert back["best"] == math.inf
    assert math.isnan(back["bad"][0])
    assert back["third"] == 0.1 + 0.2


@pytest.mark.parametrize("content", [b"", b'{"step": 1', b"\xff\xfe", b"{} {}"])
def test_a_torn_file_is_named(tmp_path, content):
    path = tmp_path / "status.json"
    path.write_bytes(content)
    with pytest.raises(NormLabError, match=f"{path} is torn or is not JSON"):
        files.read_json(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(NormLabError, match=r"cannot read .*status.json: No such file or directory; check the path"):
        files.read_json(tmp_path / "status.json")


def test_what_json_cannot_carry_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "state.json", {"a": object()})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 1_000_003])
def test_digest(tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert files.digest(tmp_path / "file") == (size, hashlib.sha256(data).hexdigest())


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "out"
    for word in ("first", "second"):
        with files.replacing_folder(target) as part:
            (part / word).write_text(word)
            assert part.parent == tmp_path
        assert os.listdir(target) == [word]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_fails_leaves_what_was_there(tmp_path, monkeypatch, there):
    target, own, calls = tmp_path / "out", os.replace, []
    if there:
        target.mkdir()
        (target / "old").write_text("old")

    def fails_at_last(source, destination):
        calls.append(destination)
        if str(source).endswith(".part"):
            raise OSError(errno.ENOSPC, "No space left on device")
        own(source, destination)

    monkeypatch.setattr(os, "replace", fails_at_last)
    with pytest.raises(NormLabError, match="free some space"), files.replacing_folder(target) as part:
        (part / "new").write_text("new")
    assert os.listdir(tmp_path) == (["out"] if there else [])
    assert not there or os.listdir(target) == ["old"]
    with pytest.raises(ZeroDivisionError), files.replacing_folder(target) as part:
        (part / "new").write_text(str(1 / 0))
    assert os.listdir(tmp_path) == (["out"] if there else [])
