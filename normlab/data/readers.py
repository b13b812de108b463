"""Readers for text, JSON lines and Parquet files, compressed or not, as a stream of chunks.

A chunk is about a megabyte of unparsed text: one thread reads chunks, several parse and tokenise them.
"""

from __future__ import annotations

import gzip
import json
import lzma
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from normlab.errors import NormLabError
from normlab.utils.lazy import import_optional

SUFFIXES = (".txt", ".md", ".py", ".tex", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")

CHUNK_BYTES = 1 << 20
WHOLE_BYTES = 1 << 24
"""A text file up to this size is one document. A larger one is split at line ends into documents of `CHUNK_BYTES`, so
that it fits into memory and can be divided into training and validation."""

_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One text: the unit of the train-validation split and of document boundaries in attention."""

    id: str
    """Its origin: the file, with line or row if there are several."""

    text: str


@dataclass(frozen=True)
class TextChunk:
    """Unparsed documents of a file."""

    size: int
    """Approximate bytes of text, a measure of the work."""

    taken: int
    """Bytes read from the file, for progress; fewer than `size` if the file is compressed."""

    parse: Callable[[], Iterable[Document]]
    """Parses the chunk; can be pickled, since another process may call it."""


def kind(path: Path) -> str | None:
    """The file type as a suffix, without that of a compression; None if it is not supported."""
    stem = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    compressed_table = stem is not path and stem.suffix == ".parquet"
    return stem.suffix if stem.suffix in SUFFIXES and not compressed_table else None


def read(path: Path, name: str, field: str) -> Iterator[TextChunk]:
    """The chunks of a file, in order; `name` is its name in errors and document ids."""
    suffix = kind(path)
    with _readable(path, name):
        if suffix == ".parquet":
            yield from _table(path, name, field)
        elif suffix == ".jsonl":
            yield from _lines(path, name, field)
        else:
            yield from _text(path, name)


def read_python(path: Path, name: str) -> Iterator[TextChunk]:
    """A Python source file in its declared encoding; skipped if it cannot be decoded."""
    with _readable(path, name):
        size = path.stat().st_size
    yield TextChunk(size, size, partial(_python, path, name))


def _python(path: Path, name: str) -> Iterator[Document]:
    try:
        with _readable(path, name), tokenize.open(path) as file:
            yield from _document(name, file.read())
    except (SyntaxError, UnicodeDecodeError):
        return


@contextmanager
def _readable(path: Path, name: str) -> Iterator[None]:
    """Turn errors of a corrupt or unreadable file into one line."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        packing = path.suffix[1:]
        raise NormLabError(f"{name}: broken {packing} data ({error}); fetch or compress the file again") from None
    except OSError as error:
        raise NormLabError(f"{name}: cannot be read: {error.strerror or error}") from None


def texts(rows: Iterable[tuple[str, Any]], field: str) -> Iterator[Document]:
    """Documents from (id, value) pairs of a table."""
    for id_, value in rows:
        if not isinstance(value, str):
            raise NormLabError(f"{id_}: field {field!r} holds {type(value).__name__}, expected text")
        yield from _document(id_, value)


def table_size(values: Iterable[Any]) -> int:
    """Approximate bytes of text in a column."""
    return sum(len(value) for value in values if isinstance(value, str))


def _document(id_: str, text: str) -> Iterator[Document]:
    # An empty document would be a lone end token.
    if text:
        yield Document(id_, text)


def _parts(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The decompressed content of a file, piece by piece."""
    if path.suffix == ".zst":
        return _zstd_parts(file, import_optional("zstandard", "zstd", f"reading {path.name}"))
    if path.suffix == ".xz":
        return _xz_parts(file)
    opened = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    return iter(lambda: opened.read(CHUNK_BYTES), b"")


def _xz_parts(file: IO[bytes]) -> Iterator[bytes]:
    # Not lzma.open, which takes a damaged second stream for the end of the file.
    stream, raw = lzma.LZMADecompressor(), b""
    while True:
        if stream.eof:
            raw = stream.unused_data
            # Zeros may pad a stream.
            while not (raw := raw.lstrip(b"\0")):
                if not (raw := file.read(1 << 16)):
                    return
            stream = lzma.LZMADecompressor()
        elif stream.needs_input and not (raw := file.read(1 << 16)):
            raise EOFError("the file ends too early")
        yield stream.decompress(raw, CHUNK_BYTES)
        raw = b""


def _zstd_parts(file: IO[bytes], zstd: Any) -> Iterator[bytes]:
    # Not the package's stream reader, which accepts truncated files.
    frame, raw = None, b""
    try:
        while raw := raw or file.read(1 << 16):
            frame = frame or zstd.ZstdDecompressor().decompressobj()
            yield frame.decompress(raw)
            raw, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstd.ZstdError as error:
        raise EOFError(str(error)) from None
    if frame:
        raise EOFError("the file ends too early")


def _blocks(path: Path, cut: Callable[[bytes], int]) -> Iterator[tuple[bytes, int]]:
    """(block, bytes read from the file) pairs: blocks of about `CHUNK_BYTES` that end where `cut` says."""
    with open(path, "rb") as file:
        parts, rest, want, seen = _parts(file, path), b"", CHUNK_BYTES, 0
        while block := _fill(parts, rest, want):
            end = len(block) if len(block) < want else cut(block)
            if end:
                yield block[:end], file.tell() - seen
                seen = file.tell()
            # A line longer than a chunk: read more to find its end.
            want = CHUNK_BYTES if end else 2 * want
            rest = block[end:]


def _fill(parts: Iterator[bytes], start: bytes, want: int) -> bytes:
    """Join `start` with further parts until there are `want` bytes or the file ends."""
    have, size = [start], len(start)
    while size < want and (part := next(parts, None)) is not None:
        have.append(part)
        size += len(part)
    return b"".join(have)


def _after_line(block: bytes) -> int:
    return block.rfind(b"\n") + 1


def _after_text(block: bytes) -> int:
    """Position after the last line, else after the last word, else after the last whole character."""
    starts = (i for i in range(len(block) - 1, 0, -1) if block[i] & 0xC0 != 0x80)
    return _after_line(block) or block.rfind(b" ") + 1 or next(starts, len(block))


def _text(path: Path, name: str) -> Iterator[TextChunk]:
    blocks, held, line = _blocks(path, _after_text), [], 1
    while sum(len(block) for block, _ in held) <= WHOLE_BYTES:
        if (more := next(blocks, None)) is None:
            whole, taken = b"".join(block for block, _ in held), sum(taken for _, taken in held)
            yield TextChunk(len(whole), taken, partial(_section, whole, name, name, 1))
            return
        held.append(more)
    for block, taken in chain(held, blocks):
        yield TextChunk(len(block), taken, partial(_section, block, f"{name}:{line}", name, line))
        line += block.count(b"\n")


def _section(block: bytes, id_: str, name: str, line: int) -> Iterator[Document]:
    return _document(id_, _decode(block, name, line))


def _lines(path: Path, name: str, field: str) -> Iterator[TextChunk]:
    line = 1
    for block, taken in _blocks(path, _after_line):
        yield TextChunk(len(block), taken, partial(_records, block, name, line, field))
        line += block.count(b"\n")


def _records(block: bytes, name: str, first: int, field: str) -> Iterator[Document]:
    for line, raw in enumerate(block.split(b"\n"), first):
        if not raw.strip():
            continue
        where = f"{name}, line {line}"
        try:
            record = json.loads(_decode(raw, name, line))
        except (ValueError, RecursionError) as error:
            if isinstance(error, NormLabError):
                raise
            raise NormLabError(f"{where}: not JSON ({error}); expected one object a line") from None
        yield from _document(f"{name}:{line}", _field(record, where, field))


def _field(record: Any, where: str, field: str) -> str:
    if not isinstance(record, dict):
        raise NormLabError(f"{where}: a {type(record).__name__}, expected an object with a field {field!r}")
    if field not in record:
        have = ", ".join(map(repr, record)) or "nothing"
        raise NormLabError(f"{where}: no field {field!r}, only {have}; name one with PATH#FIELD")
    text = record[field]
    if not isinstance(text, str):
        raise NormLabError(f"{where}: field {field!r} holds {type(text).__name__}, expected text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can contain half a surrogate pair, which is not a character.
        raise NormLabError(f"{where}: field {field!r} holds half a surrogate pair; expected whole characters") from None
    return text


def _decode(raw: bytes, name: str, line: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        bad = raw[error.start : error.start + 1].hex()
        raise NormLabError(f"{name}, line {line}: byte 0x{bad} is not UTF-8; convert the file to UTF-8") from None
    if (zeros := text.count("\0")) > len(text) // 10:
        raise NormLabError(
            f"{name}, line {line}: {zeros:,} of {len(text):,} characters are NUL, as in a binary or a damaged file; "
            f"expected text"
        )
    return text[1:] if line == 1 and raw.startswith(_BOM) else text


def _table(path: Path, name: str, field: str) -> Iterator[TextChunk]:
    parquet = import_optional("pyarrow.parquet", "parquet", f"reading {name}")
    arrow = import_optional("pyarrow", "parquet", f"reading {name}")
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                have = ", ".join(map(repr, columns)) or "nothing"
                raise NormLabError(f"{name}: no column {field!r}, only {have}; name one with PATH#COLUMN")
            row, share = 0, path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                values = batch.column(0).to_pylist()
                rows = [(f"{name}:{row + i}", value) for i, value in enumerate(values)]
                yield TextChunk(table_size(values), round(share * len(rows)), partial(texts, rows, field))
                row += len(rows)
    except arrow.ArrowException as error:
        raise NormLabError(f"{name}: not a parquet table ({str(error).splitlines()[0]})") from None
