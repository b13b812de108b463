"""Atomic file writes, JSON files, checksums, and file errors in one line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError

_ADVICE = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some of your quota, or choose another folder",
    errno.EACCES: "check its permissions, or choose another folder",
    errno.EPERM: "check its permissions, or choose another folder",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a file stands where a folder was expected",
    errno.EISDIR: "name a file, not a folder",
}


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` atomically: after a crash or power failure it holds the old or the new content."""
    with replacing(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager: a temporary path that replaces `path` on success and is removed on failure."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        mode = _usual_mode(part)
        yield part
        part.chmod(mode)
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except OSError as error:
        raise file_error("write", error, path) from error
    finally:
        # After the replacement there is nothing left to remove.
        with suppress(OSError):
            part.unlink()


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Context manager: a temporary folder that replaces the folder `path` on success and is removed on failure."""
    mark = secrets.token_hex(4)
    part, aside = path.with_name(f".{path.name}.{mark}.part"), path.with_name(f".{path.name}.{mark}.old")
    try:
        part.mkdir()
        mode = _usual_mode(part / ".mode")
        (part / ".mode").unlink()
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                file.chmod(mode)
            sync(file)
        sync(part)
        if path.exists():
            os.replace(path, aside)
        try:
            os.replace(part, path)
        except OSError:
            if aside.exists():
                os.replace(aside, path)
            raise
        sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise file_error("write", error, path) from error
    finally:
        # After the replacement there is nothing left to remove.
        shutil.rmtree(part, ignore_errors=True)


def _usual_mode(path: Path) -> int:
    """Create an empty file; returns the permissions that the umask gives it.

    Libraries that write through a private temporary file (safetensors) leave 0600, which other users cannot read.
    """
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. NaN and infinities are written as Python's json module reads them."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raises with its path if it is missing, incomplete or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise file_error("read", error, path) from error
    except ValueError as error:
        raise NormLabError(f"{path} is torn or is not JSON ({error}); restore it, or remove it") from None


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> tuple[int, str]:
    """(size, SHA-256) of a file, after an fsync."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def file_error(action: str, error: OSError, path: Path | None = None) -> NormLabError:
    """A NormLabError for an OSError: one line with the path and what to try."""
    advice = _ADVICE.get(error.errno or 0, "try again, or choose another folder")
    return NormLabError(f"cannot {action} {path or error.filename or 'a file'}: {error.strerror or error}; {advice}")


def save(path: str | Path, writers: Mapping[str, Callable[[], str]]) -> Path:
    """Write a file with the writer for its suffix; `writers` maps suffixes to functions that return the text."""
    path = Path(path)
    if path.suffix.lower() not in writers:
        raise NormLabError(f"{path} must end in {' or '.join(writers)}: the suffix says what to write")
    # Half of a surrogate pair cannot be encoded; the rest of the text can.
    write_atomically(path, writers[path.suffix.lower()]().encode("utf-8", "replace"))
    return path


def writable(path: str | Path, suffix: str) -> Path:
    """Check that a file with this suffix can be written at `path`, before any work; returns the path."""
    path = Path(path)
    if path.is_dir():
        raise NormLabError(f"{path} is a folder; expected a file, e.g. {path / f'report{suffix}'}")
    if path.suffix.lower() != suffix:
        raise NormLabError(f"{path} must end in {suffix}; try {path.with_suffix(suffix)}")
    if not path.parent.is_dir():
        raise NormLabError(f"{path.parent} is not a folder; make it first, or choose another one")
    if not os.access(path.parent, os.W_OK):
        raise NormLabError(f"{path.parent} cannot be written to; choose another folder")
    return path
