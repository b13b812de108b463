"""Wheels pinned by name, version and sha256: resolved and downloaded by pip, read without running any of them."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any, NamedTuple

from normlab.errors import NormLabError
from normlab.utils.files import file_error, write_atomically

BATCH = 20
"""Wheels that pip downloads in one call: what an interruption can lose."""
MEMBER_BYTES = 1 << 20
"""A larger file of a wheel is a table, not written by hand."""
WHEEL_BYTES = 1 << 28
"""A wheel with more text than this is refused: none of the pinned ones comes near it."""

# One Python on one platform: every machine takes the same wheels. Never a source archive, whose build would run code.
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
_WHEELS = ("--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.13",
           *(word for name in _PLATFORMS for word in ("--platform", name)))  # fmt: skip
_QUIET = ("--quiet", "--no-input", "--disable-pip-version-check")

_PIN = re.compile(r"(?P<name>[\w.-]+)(==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64}))?", re.ASCII)
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")


class Pin(NamedTuple):
    """One wheel. A line of the manifest, which is a file of requirements as pip reads it."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_pins(manifest: Path) -> list[Pin]:
    """The wheels that a manifest names."""
    found = [Pin(**line.groupdict()) for line in _lines(manifest)]
    if loose := [pin.name for pin in found if not pin.sha256]:
        raise NormLabError(f"{manifest}: {loose[0]} has no version and sha256; add them with --update")
    return found


def update_pins(manifest: Path) -> list[Pin]:
    """Pin the newest version of every package of the manifest; comments above the first package stay."""
    names = sorted({_normalised(line["name"]) for line in _lines(manifest)})
    report = json.loads(_pip("install", "--dry-run", "--ignore-installed", "--target", "unused", "--report", "-",
                             *_WHEELS, *names))  # fmt: skip
    newest = sorted(_newest(entry) for entry in report["install"])
    comments = [line for line in manifest.read_text("utf-8").splitlines() if line.startswith("#")]
    write_atomically(manifest, "\n".join([*comments, *map(str, newest)]) + "\n")
    return newest


def fetch(pins: Sequence[Pin], folder: Path) -> list[Path]:
    """The files of wheels. What is in the folder with the right sha256 already is not downloaded again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("make", error, folder) from error
    here = _by_sum(folder)
    missing = [pin for pin in pins if pin.sha256 not in here]
    for first in range(0, len(missing), BATCH):
        batch = missing[first : first + BATCH]
        print(f"downloading wheels {first + 1} to {first + len(batch)} of {len(missing)}", file=sys.stderr)
        _download(batch, folder)
    here = _by_sum(folder)
    return [here[pin.sha256] for pin in pins]


def sources(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of a wheel's Python files, unpacked one by one and only in memory."""
    left = WHEEL_BYTES
    with _opened(wheel) as archive:
        for info in archive.infolist():
            if not _is_source(info):
                continue
            raw = _content(archive, info)
            left -= len(raw)
            if left < 0:
                raise NormLabError(f"{wheel.name}: over {WHEEL_BYTES >> 20} MiB of source; take it out of the manifest")
            yield info.filename, raw


def metadata(wheel: Path) -> Message:
    """The headers of a wheel's METADATA."""
    with _opened(wheel) as archive:
        found = [info for info in archive.infolist() if _METADATA.fullmatch(info.filename)]
        if len(found) != 1:
            raise NormLabError(f"{wheel.name}: {len(found)} files METADATA, expected one; this is no wheel")
        return BytesHeaderParser().parsebytes(_content(archive, found[0]))


def _lines(manifest: Path) -> Iterator[re.Match[str]]:
    try:
        lines = manifest.read_text("utf-8").splitlines()
    except OSError as error:
        raise file_error("read", error, manifest) from error
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if not (match := _PIN.fullmatch(line)):
            raise NormLabError(f"{manifest}, line {number}: expected NAME==VERSION --hash=sha256:SUM, got {line!r}")
        yield match


def _newest(entry: dict[str, Any]) -> Pin:
    about, sums = entry["metadata"], entry["download_info"]["archive_info"]["hashes"]
    return Pin(_normalised(about["name"]), about["version"], sums["sha256"])


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(pins: Iterable[Pin], folder: Path) -> None:
    lines = "".join(f"{pin}\n" for pin in pins)
    _pip("download", "--require-hashes", "--dest", str(folder), *_WHEELS, "--requirement", "/dev/stdin", text=lines)


def _pip(*words: str, text: str = "") -> str:
    """What pip prints; where it looks for packages is what pip is configured to on this machine."""
    ended = subprocess.run([sys.executable, "-m", "pip", *words, *_QUIET], input=text, capture_output=True, text=True)
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.strip()] or ["no reason given"]
        errors = [line for line in said if line.startswith("ERROR:")] or said
        raise NormLabError(f"pip {words[0]}: {errors[-1].removeprefix('ERROR: ')}")
    return ended.stdout


def _by_sum(folder: Path) -> dict[str, Path]:
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(folder.glob("*.whl"))}


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    # An encrypted member is a RuntimeError, an unknown compression a NotImplementedError, which is one, too.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        raise NormLabError(f"{wheel.name}: broken wheel ({error}); remove it and run again") from None


def _is_source(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a regular Python file of ordinary size below the root of the wheel."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    inside = not info.filename.startswith("/") and ".." not in info.filename.split("/") and "\\" not in info.filename
    return inside and kind in (0, stat.S_IFREG) and info.filename.endswith(".py") and info.file_size <= MEMBER_BYTES


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{info.filename} is compressed by method {info.compress_type}")
    with archive.open(info) as file:
        # With a limit: without one a member that is larger than its header says is unpacked whole before it is refused.
        return file.read(MEMBER_BYTES + 1)
