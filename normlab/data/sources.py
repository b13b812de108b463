"""Text sources: Python's standard library, files, folders, globs, Hugging Face data sets.

A source yields its documents in the same order on every machine with the same content, whatever the order of the file
system. Its fingerprint depends on the content alone, not on modification times.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from normlab.data.readers import COMPRESSIONS, SUFFIXES, Document, TextChunk, kind, read, read_python, table_size, texts
from normlab.errors import NormLabError
from normlab.utils.lazy import import_optional

_HIDDEN = re.compile(r"\..*")
# Excluded from the standard library: installed packages, tests, compiled files, build configuration.
_NOT_SOURCE = re.compile(r"\..*|site-packages|dist-packages|__pycache__|tests?|idle_test|config-.*|_sysconfigdata.*")

_HUB = re.compile(r"hf:(?P<name>[^:@#]+)(:(?P<config>[^@#]+))?(@(?P<split>[^#]+))?(#(?P<field>.+))?")

Stamp = list[tuple[int, int]]
"""Size and modification time of each file."""


class Source(ABC):
    """Base class of text sources: documents in a fixed order. `chunks()` yields them unparsed, for parallel parsing."""

    files: Sequence[Path] = ()

    @abstractmethod
    def chunks(self) -> Iterator[TextChunk]:
        """The documents in chunks that can be parsed in parallel."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the content and of the way it is read."""

    @abstractmethod
    def describe(self) -> str:
        """A summary in one line."""

    def size(self) -> int:
        """Total size of the files in bytes, for progress; 0 if unknown."""
        return sum(size for size, _ in self.stamp())

    def stamp(self) -> Stamp:
        """Size and modification time of the files, to detect changes while they are read."""
        try:
            return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, self.files)]
        except OSError as error:
            raise NormLabError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def __iter__(self) -> Iterator[Document]:
        for chunk in self.chunks():
            yield from chunk.parse()


class Files(Source):
    """Files of known types, sorted by their path below a common root."""

    def __init__(self, spec: str, root: Path, files: Sequence[Path], field: str = "text", *, python: bool = False):
        self.spec, self.field, self._python = spec, field, python
        named = sorted((path.relative_to(root).as_posix(), path) for path in files)
        self.names, self.files = [name for name, _ in named], [path for _, path in named]

    def chunks(self) -> Iterator[TextChunk]:
        for name, path in zip(self.names, self.files, strict=True):
            yield from read_python(path, name) if self._python else read(path, self._shown(name), self.field)

    def fingerprint(self) -> str:
        # Hashing releases the GIL, so threads read at the speed of the disk.
        with ThreadPoolExecutor() as pool:
            digests = pool.map(_digest, self.files)
            lines = [f"{name}\0{digest}" for name, digest in zip(self.names, digests, strict=True)]
        return _hash("files", self.field, "python" if self._python else "", *lines)

    def describe(self) -> str:
        count = len(self.files)
        return f"{self.spec}: {count:,} file{'s' * (count != 1)}, {self.size() / 1e6:,.1f} MB"

    def _shown(self, name: str) -> str:
        return name if len(self.files) > 1 else self.files[0].name


class Hub(Source):
    """One field of one split of a Hugging Face data set."""

    def __init__(self, spec: str, rows: Any, field: str):
        self.spec, self.rows, self.field = spec, rows, field

    def chunks(self) -> Iterator[TextChunk]:
        row = 0
        for batch in self.rows.iter(batch_size=64):
            values = batch[self.field]
            pairs = [(f"{self.spec}:{row + i}", value) for i, value in enumerate(values)]
            yield TextChunk(table_size(values), 0, partial(texts, pairs, self.field))
            row += len(pairs)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for document in self:
            # With the length, the boundary between two documents matters for the hash.
            text = document.text.encode("utf-8")
            digest.update(len(text).to_bytes(8, "little") + text)
        return _hash("hub", digest.hexdigest())

    def describe(self) -> str:
        return f"{self.spec}: {len(self.rows):,} rows"


class Several(Source):
    """Several sources, concatenated."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sources
        self.files = [path for source in sources for path in source.files]

    def chunks(self) -> Iterator[TextChunk]:
        for source in self.sources:
            yield from source.chunks()

    def fingerprint(self) -> str:
        return _hash("several", *(source.fingerprint() for source in self.sources))

    def describe(self) -> str:
        return "; ".join(source.describe() for source in self.sources)


def open_source(spec: str) -> Source:
    """Open the source that `spec` names.

    `python` is the standard library of the running Python: its source and text files (`pydoc_data/topics.py` holds the
    language reference), without tests and installed packages. A file, a folder (all files of known types in it, without
    hidden ones) or a glob may end in `#FIELD`, the field of JSON lines or the column of a table (default: `text`).
    `hf:NAME[:CONFIG][@SPLIT][#FIELD]` is a Hugging Face data set. A text file is one document unless it is larger than
    16 MiB: see `readers.WHOLE_BYTES`.
    """
    if not spec:
        # As an unset shell variable leaves it: it would mean this folder.
        raise NormLabError("the name of a source is empty; expected 'python', a file, a folder, a glob or hf:NAME")
    if spec == "python":
        return _standard_library()
    if spec.startswith("hf:"):
        return _hub(spec)
    path, field = spec, "text"
    # A file name may contain a #.
    if not glob.glob(os.path.expanduser(spec), recursive=True) and "#" in spec:
        path, _, field = spec.rpartition("#")
    return _files(spec, Path(path).expanduser(), field or "text")


def find_source(spec: str) -> None:
    """Raise if a source is not on this machine. A data set of the hub is not looked for: that would load it."""
    if not spec.startswith("hf:"):
        open_source(spec)


def open_sources(specs: Sequence[str]) -> Source:
    """Open several specifications as one source, in the given order."""
    if isinstance(specs, str) or not specs:
        raise NormLabError("no data given; expected a list of sources, e.g. ['python'] or ['books/*.jsonl.xz']")
    sources = [open_source(spec) for spec in specs]
    return sources[0] if len(sources) == 1 else Several(sources)


def _standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in _below(root, _NOT_SOURCE) if path.suffix in (".py", ".txt", ".rst")]
    if not found:
        raise NormLabError(f"this Python keeps no source in {root}; name files of your own instead of 'python'")
    return Files("python", root, found, python=True)


def _files(spec: str, path: Path, field: str) -> Source:
    if path.is_file():
        if kind(path) is None:
            raise NormLabError(f"{path.name}: not a kind of file that can be read; expected {_kinds()}")
        return Files(spec, path.parent, [path], field)
    if path.is_dir():
        root, found = path, _below(path, _HIDDEN)
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
        if not found:
            raise NormLabError(f"no file matches {spec!r}; expected 'python', a file, a folder, a glob or hf:NAME")
        root = Path(os.path.commonpath([file.parent for file in found]))
    known = [file for file in found if kind(file)]
    if not known:
        raise NormLabError(f"{spec!r} holds no file that can be read; expected {_kinds()}")
    return Files(spec, root, known, field)


def _below(root: Path, skip: re.Pattern[str]) -> list[Path]:
    """All files in a folder and its subfolders, without files and folders whose name matches `skip`."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip.fullmatch(name)]
        found += [Path(folder, name) for name in names if not skip.fullmatch(name)]
    # Without broken symbolic links.
    return [path for path in found if path.is_file()]


def _kinds() -> str:
    return f"{' '.join(SUFFIXES)} (all but .parquet also with {' '.join(COMPRESSIONS)})"


def _hub(spec: str) -> Source:
    match = _HUB.fullmatch(spec)
    if not match:
        raise NormLabError(
            f"{spec!r} is not a dataset; expected hf:NAME[:CONFIG][@SPLIT][#FIELD], e.g. hf:roneneldan/TinyStories"
        )
    name, config, split, field = match.group("name", "config", "split", "field")
    datasets = import_optional("datasets", "hf", spec)
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # the package raises whatever its many parts raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NormLabError(f"{spec}: cannot be loaded ({reason}); check name, config, split and network") from None
    field = field or "text"
    if field not in rows.column_names:
        have = ", ".join(map(repr, rows.column_names))
        raise NormLabError(f"{spec}: no field {field!r}, only {have}; name one with hf:{name}#FIELD")
    return Hub(spec, rows, field)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NormLabError(f"{path}: cannot be read: {error.strerror}") from None


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
