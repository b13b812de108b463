"""Memory-mapped token cache on disk, built once per content and tokenizer and shared by all processes.

ROOT/KEY.lock        held by the process that builds KEY
ROOT/KEY.part/       an unfinished build; if its lock is free, the process that built it is dead
ROOT/KEY/tokens.bin  every document followed by the end token, uint16 or uint32
    starts.bin       int64, start of each document, and the end of the last one
    bytes.bin        int64, UTF-8 bytes of each document
    digests.bin      uint64, first 8 bytes of the SHA-256 of each document's UTF-8
    meta.json        sizes of all these files; written last
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from normlab.data.encode import encode
from normlab.data.encoded import Encoded
from normlab.data.sources import Source, Stamp
from normlab.data.tokenizer import Bytes as ByteTokenizer
from normlab.data.tokenizer import (
    Tokenizer,
    bpe_size,
    is_tokenizer_file,
    load_from_hub,
    load_tokenizer,
    one_thread_a_call,
    train_bpe,
)
from normlab.errors import NormLabError, unknown
from normlab.utils.files import sync, write_atomically
from normlab.utils.locks import wait_for

FORMAT = 1
Cache = TypeVar("Cache")
_INDEX = {"starts": np.dtype(np.int64), "bytes": np.dtype(np.int64), "digests": np.dtype(np.uint64)}


@dataclass(frozen=True)
class TokenCache:
    """Memory-mapped tokens of a source, with the start, size and hash of each document."""

    key: str
    tokens: np.ndarray
    starts: np.ndarray
    bytes: np.ndarray
    digests: np.ndarray


def cache_root(root: Path | None = None) -> Path:
    """The cache folder: `root` if given, else `$NORMLAB_CACHE`, else `~/.cache/normlab/tokens`."""
    told = root or os.environ.get("NORMLAB_CACHE")
    return Path(told).expanduser() if told else Path.home() / ".cache" / "normlab" / "tokens"


def cached_tokens(source: Source, tokenizer: Tokenizer, root: Path, *, workers: int, progress: bool) -> TokenCache:
    """Open the token cache of `source`; builds it if it is missing or incomplete."""
    stamp = source.stamp()
    key = key_of(FORMAT, source.fingerprint(), tokenizer.fingerprint)

    def build(path: Path) -> None:
        _build(source, stamp, tokenizer, path, workers=workers, progress=progress)

    return built(root / key, _open, build, progress=progress)


def built(
    path: Path,
    open_: Callable[[Path], Cache | None],
    build: Callable[[Path], None],
    *,
    progress: bool,
    kind: str = "token",
) -> Cache:
    """Open the cache at `path`; if it is missing or incomplete, one process builds it and the others wait."""
    root = path.parent
    if found := open_(path):
        return found
    with _writing(root, kind), _holding(root / f"{path.name}.lock", progress, kind):
        # Another process may have built it while this one waited for the lock.
        if found := open_(path):
            return found
        _remove_leftovers(root)
        build(path)
    if found := open_(path):
        return found
    raise NormLabError(f"the {kind} cache {path} vanished or broke right after it was built; name another folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager: a temporary folder that replaces `path` on success and is removed on failure."""
    part = path.with_name(f"{path.name}.part")
    # This process holds the lock, so the owner of an existing part is dead.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        # An existing cache was incomplete.
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def cached_tokenizer(spec: str, source: Source, root: Path, *, progress: bool) -> Tokenizer:
    """The tokenizer that `spec` names; `bpe:N` is trained on `source` once and stored beside its tokens."""
    if spec == "bytes":
        return ByteTokenizer()
    if size := bpe_size(spec):
        return _trained(size, source, root, progress)
    if is_tokenizer_file(spec):
        return load_tokenizer(Path(spec).expanduser())
    # Detect typing errors here, because the hub takes half a minute to fail.
    if difflib.get_close_matches(spec.lower(), ["bytes", "bpe"], cutoff=0.7):
        raise unknown("tokenizer", spec, ["bytes", "bpe:N", "a tokenizer file", "a Hugging Face id"])
    return load_from_hub(spec)


def _trained(size: int, source: Source, root: Path, progress: bool) -> Tokenizer:
    key = key_of(FORMAT, source.fingerprint(), f"bpe:{size}")
    path = root / f"bpe-{size}-{key}.json"
    if not path.exists():
        with _writing(root), _holding(root / f"{key}.lock", progress):
            # Another process may have trained it while this one waited for the lock.
            if not path.exists():
                if progress:
                    print(f"training a tokenizer of {size:,} entries on {source.describe()}", file=sys.stderr)
                train_bpe((document.text for document in source), size).save(path)
    return load_tokenizer(path, name=f"bpe:{size}")


def key_of(*parts: Any) -> str:
    """A cache key: the hash of some values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(path: Path) -> TokenCache | None:
    """Open the cache at `path`; None if it is missing or a file does not have its recorded size."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if any((path / name).stat().st_size != size for name, size in meta["sizes"].items()):
            return None
        kinds = {"tokens": np.dtype(meta["dtype"]), **_INDEX}
        arrays = {name: np.memmap(path / f"{name}.bin", kind, mode="r") for name, kind in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # Plain arrays over the same pages: indexing a memmap creates a new memmap each time, which is slow.
    return TokenCache(key=path.name, **{name: np.asarray(array) for name, array in arrays.items()})


def _build(source: Source, stamp: Stamp, tokenizer: Tokenizer, path: Path, *, workers: int, progress: bool) -> None:
    with new_folder(path) as part:
        with one_thread_a_call(), closing(encode(source, tokenizer, workers=workers, progress=progress)) as found:
            _write(found, part, tokenizer, source)
        # The key belongs to the content at the time of hashing.
        if source.stamp() != stamp:
            raise NormLabError(f"{source.describe()}: changed while it was being read; try again when it is complete")


def _write(found: Iterator[Encoded], part: Path, tokenizer: Tokenizer, source: Source) -> None:
    names = [f"{name}.bin" for name in ("tokens", *_INDEX)]
    tokens, documents = 0, 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(part / name, "wb")) for name in names}
        for piece in found:
            starts = tokens + np.cumsum(piece.lengths) - piece.lengths
            for name, array in zip(names, (piece.ids, starts, piece.bytes, piece.digests), strict=True):
                files[name].write(array.data)
            tokens += len(piece.ids)
            documents += len(piece.lengths)
        if not documents:
            raise NormLabError(f"{source.describe()}: no text in it; expected at least one document that is not empty")
        files["starts.bin"].write(np.int64(tokens).tobytes())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    sizes = {name: (part / name).stat().st_size for name in names}
    meta = {"sizes": sizes, "dtype": tokenizer.dtype.name, "tokenizer": tokenizer.name, "source": source.describe()}
    write_atomically(part / "meta.json", json.dumps(meta, indent=1))


@contextmanager
def _writing(root: Path, kind: str = "token") -> Iterator[None]:
    """Create the cache folder; turns a failure to write into an error of one line."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "no space left; free some or" if full else f"{error.strerror or error};"
        raise NormLabError(f"{kind} cache {root}: {reason} name another folder with NORMLAB_CACHE") from None


@contextmanager
def _holding(path: Path, progress: bool, kind: str = "token") -> Iterator[None]:
    with wait_for(path, patient=False) as mine:
        if mine:
            yield
            return
    if progress:
        print(f"waiting for another process that builds the same {kind} cache", file=sys.stderr)
    with wait_for(path):
        yield


def _remove_leftovers(root: Path) -> None:
    """Delete unfinished builds of dead processes: parts whose lock is free."""
    for part in root.glob("*.part"):
        with wait_for(part.with_suffix(".lock"), patient=False) as dead:
            if dead:
                shutil.rmtree(part, ignore_errors=True)
