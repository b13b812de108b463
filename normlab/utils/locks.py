"""File locks between processes: `hold` raises if another process has the lock, `wait_for` waits.

The system releases a lock when its process ends, however it ends, so there are no stale locks. The file itself is not
removed, because two processes could then lock two files of the same name.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normlab.errors import NormLabError
from normlab.utils.files import file_error

_held: set[int] = set()


@contextmanager
def wait_for(path: Path, *, patient: bool = True) -> Iterator[bool]:
    """Wait for the lock `path` and hold it; with `patient=False` yields False at once if it is taken."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock `path`; raises at once, with the holder's process, if it is taken."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise file_error("lock", error, path) from error
    try:
        _take(handle, path)
        _held.add(handle)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _take(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NormLabError(
            f"{path.parent} is in use by {_holder(handle)}; wait until that has ended, or choose another folder"
        ) from None
    except OSError as error:
        raise file_error("lock", error, path) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _holder(handle: int) -> str:
    """The process in the lock file; unknown if it has not been written yet."""
    try:
        known = json.loads(os.pread(handle, 4096, 0))
        who = f"process {known['pid']} on {known['host']}"
        return f"this process ({who})" if (known["pid"], known["host"]) == _self() else who
    except (ValueError, KeyError, TypeError):
        return "another process"


def _self() -> tuple[int, str]:
    return os.getpid(), socket.gethostname()


def _let_go_in_child() -> None:
    # A forked worker inherits the lock; if it outlives its parent it must not keep the run locked.
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
