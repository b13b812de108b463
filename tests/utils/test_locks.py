"""A run has one writer, and a dead one does not count."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from normlab.errors import NormLabError
from normlab.utils.locks import hold

HOLD = """
import pathlib, sys, time
from normlab.errors import NormLabError
from normlab.utils.locks import hold
try:
    with hold(pathlib.Path(sys.argv[1])):
        {inside}
        print("held", flush=True)
        time.sleep(60)
except NormLabError as error:
    print(error, flush=True)
"""
# The child outlives its parent, and says who it is once it runs; the parent waits for that.
FORK = """
        import os
        said, tell = os.pipe()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.write(tell, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(said, 1)
"""


def start(path, inside: str = "pass") -> subprocess.Popen[str]:
    code = HOLD.format(inside=inside)
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_second_is_told_who_the_first_is_until_it_dies(tmp_path):
    path = tmp_path / "lock"
    first = start(path)
    try:
        assert line(first) == "held"
        who = f"{tmp_path} is in use by process {first.pid} on {socket.gethostname()}; "
        with pytest.raises(NormLabError, match=who), hold(path):
            pass
        with pytest.raises(NormLabError, match=who), hold(path):
            pass
    finally:
        end(first)
    with hold(path):
        pass


def test_of_two_that_start_at_once_one_wins(tmp_path):
    both = [start(tmp_path / "lock") for _ in range(2)]
    try:
        said = [line(process) for process in both]
        assert sum(text == "held" for text in said) == 1
        assert sum("is in use by" in text for text in said) == 1
    finally:
        for process in both:
            end(process)


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    parent = start(tmp_path / "lock", FORK)
    worker = int(line(parent))
    try:
        assert line(parent) == "held"
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        os.kill(worker, 0)  # still there
        with hold(tmp_path / "lock"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        end(parent)


def test_once_in_a_process(tmp_path):
    path = tmp_path / "lock"
    with hold(path), pytest.raises(NormLabError, match=f"in use by this process .process {os.getpid()} on"), hold(path):
        pass
    with hold(path):
        pass


def test_an_error_inside_lets_go(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), hold(path):
        raise ZeroDivisionError
    with hold(path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff"])
def test_a_holder_that_has_not_said_who_it_is_still_holds(tmp_path, content):
    path = tmp_path / "lock"
    with hold(path):
        path.write_bytes(content)
        with pytest.raises(NormLabError, match="in use by another process"), hold(path):
            pass


def test_old_content_is_replaced(tmp_path):
    path = tmp_path / "lock"
    path.write_text("x" * 10_000)
    with hold(path), pytest.raises(NormLabError, match="this process"), hold(path):
        pass


def test_a_folder_that_is_absent(tmp_path):
    complaint = "cannot lock .*: No such file or directory; check the path"
    with pytest.raises(NormLabError, match=complaint), hold(tmp_path / "absent" / "lock"):
        pass
