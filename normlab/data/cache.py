"""Tokens on disk, memory-mapped: built once per content and tokenizer, shared by every process that needs them.

ROOT/KEY.lock        held by the process that builds KEY
ROOT/KEY.part/       what it has built so far; whoever gets the lock and finds one knows that its owner is dead
ROOT/KEY/tokens.bin  every document followed by the end token, uint16 or uint32
    starts.bin       int64, where each document begins, and the end of the last: one more than documents
    bytes.bin        int64, UTF-8 bytes of each document
    digests.bin      uint64, first 8 bytes of the SHA-256 of each document's UTF-8
    meta.json        sizes of all of these; written last
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

from normlab.data.encode import Encoded, encode
from normlab.data.sources import Source, Stamp
from normlab.data.tokenizer import Bytes as ByteTokenizer
from normlab.data.tokenizer import Tokenizer, bpe_size, load_from_hub, load_tokenizer, one_thread_a_call, train_bpe
from normlab.errors import NormLabError, unknown
from normlab.utils.files import sync, write_atomically
from normlab.utils.locks import wait_for

FORMAT = 1
Cache = TypeVar("Cache")
_INDEX = {"starts": np.dtype(np.int64), "bytes": np.dtype(np.int64), "digests": np.dtype(np.uint64)}


@dataclass(frozen=True)
class TokenCache:
    """The tokens of a source, mapped into memory."""

    key: str
    tokens: np.ndarray
    starts: np.ndarray
    bytes: np.ndarray
    digests: np.ndarray


def cache_root(root: Path | None = None) -> Path:
    """Where caches live: as told, else `$NORMLAB_CACHE`, else `~/.cache/normlab/tokens`."""
    told = root or os.environ.get("NORMLAB_CACHE")
    return Path(told).expanduser() if told else Path.home() / ".cache" / "normlab" / "tokens"


def cached_tokens(source: Source, tokenizer: Tokenizer, root: Path, *, workers: int, progress: bool) -> TokenCache:
    """The tokens of `source`, built if they are not there or not whole."""
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
    """What `open_` finds at `path`, built first, by one process alone, if it is not there or not whole."""
    root = path.parent
    if found := open_(path):
        return found
    with _writing(root, kind), _holding(root / f"{path.name}.lock", progress, kind):
        # Whoever held the lock before may have built it.
        if found := open_(path):
            return found
        _remove_leftovers(root)
        build(path)
    if found := open_(path):
        return found
    raise NormLabError(f"the {kind} cache {path} vanished or broke right after it was built; name another folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when it is complete and leaves nothing when it is not."""
    part = path.with_name(f"{path.name}.part")
    # We hold the lock: whoever left one is dead.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        # A cache that was there was torn.
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def cached_tokenizer(spec: str, source: Source, root: Path, *, progress: bool) -> Tokenizer:
    """The tokenizer that `spec` names; `bpe:N` is trained on `source` once and kept beside its tokens."""
    if spec == "bytes":
        return ByteTokenizer()
    if size := bpe_size(spec):
        return _trained(size, source, root, progress)
    path = Path(spec).expanduser()
    if path.is_file() or spec.endswith((".json", ".json.gz", ".json.xz")):
        return load_tokenizer(path)
    # The hub would be asked for half a minute before it is clear that this was a slip.
    if difflib.get_close_matches(spec.lower(), ["bytes", "bpe"], cutoff=0.7):
        raise unknown("tokenizer", spec, ["bytes", "bpe:N", "a tokenizer file", "a Hugging Face id"])
    return load_from_hub(spec)


def _trained(size: int, source: Source, root: Path, progress: bool) -> Tokenizer:
    key = key_of(FORMAT, source.fingerprint(), f"bpe:{size}")
    path = root / f"bpe-{size}-{key}.json"
    if not path.exists():
        with _writing(root), _holding(root / f"{key}.lock", progress):
            # Whoever held the lock before may have trained it.
            if not path.exists():
                if progress:
                    print(f"training a tokenizer of {size:,} entries on {source.describe()}", file=sys.stderr)
                train_bpe((document.text for document in source), size).save(path)
    return load_tokenizer(path, name=f"bpe:{size}")


def key_of(*parts: Any) -> str:
    """The name of what is built from some facts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(path: Path) -> TokenCache | None:
    """The cache at `path`; None if there is none or if a file is not as long as it was when it was written."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if any((path / name).stat().st_size != size for name, size in meta["sizes"].items()):
            return None
        kinds = {"tokens": np.dtype(meta["dtype"]), **_INDEX}
        arrays = {name: np.memmap(path / f"{name}.bin", kind, mode="r") for name, kind in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # A plain array over the same pages: indexing a memmap makes a new Python object each time.
    return TokenCache(key=path.name, **{name: np.asarray(array) for name, array in arrays.items()})


def _build(source: Source, stamp: Stamp, tokenizer: Tokenizer, path: Path, *, workers: int, progress: bool) -> None:
    with new_folder(path) as part:
        with one_thread_a_call(), closing(encode(source, tokenizer, workers=workers, progress=progress)) as found:
            _write(found, part, tokenizer, source)
        # The key says what was there when it was hashed.
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
    """A folder to write into, and one line where it cannot be written."""
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
    """Delete what dead builders of other caches left: the parts whose lock nobody holds."""
    for part in root.glob("*.part"):
        with wait_for(part.with_suffix(".lock"), patient=False) as dead:
            if dead:
                shutil.rmtree(part, ignore_errors=True)
