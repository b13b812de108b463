"""Tokenizers: UTF-8 bytes, byte-level BPE trained on the data, or an existing tokenizer file."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import lzma
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from normlab.errors import NormLabError
from normlab.utils.files import write_atomically
from normlab.utils.hub import cached_file, is_reachable
from normlab.utils.lazy import import_optional

END = "<|endoftext|>"
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")

_MOST_ENTRIES = 4_000_000
"""The trainer allocates its tables for all entries at once, and aborts the process if there is no memory for them."""
_BYTES_FILE = {"normlab_tokenizer": "bytes"}

_PIECE_CHARACTERS = 1 << 18
# Byte-level tokenizers always start a token at a space between words, so splitting a text there changes no token.
_CUT = re.compile(r"(?<=\w) (?=\w)")


class Tokenizer(ABC):
    """Base class of tokenizers. The token `end` closes every document and never stands for text."""

    name: str
    vocab_size: int
    end: int
    fingerprint: str
    """A hash; equal for two tokenizers that give equal tokens."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each text, without an end token. Thread-safe."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; end tokens are left out, invalid bytes become U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of the file that `load_tokenizer` reads."""

    @abstractmethod
    def as_package(self) -> Any:
        """The same tokenizer as an object of the `tokenizers` package."""

    def encode(self, text: str) -> np.ndarray:
        """Tokens of one text."""
        return self.encode_batch([text])[0]

    def save(self, path: Path) -> None:
        """Write the file that `load_tokenizer` reads."""
        write_atomically(path, self.to_json())

    @property
    def dtype(self) -> np.dtype:
        """The smallest integer dtype that holds every token."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


class Bytes(Tokenizer):
    """UTF-8 bytes as tokens: 256 bytes and an end token."""

    name = "bytes"
    vocab_size = 257
    end = 256
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def to_json(self) -> str:
        return json.dumps(_BYTES_FILE)

    def as_package(self) -> Any:
        package = _tokenizers(self.name)
        entries = {character: byte for byte, character in enumerate(_byte_characters())}
        inner = package.Tokenizer(package.models.BPE(vocab=entries, merges=[]))
        inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        # Not byte fallback, whose decoder fails on a whole text for one invalid character.
        inner.decoder = package.decoders.ByteLevel()
        inner.add_special_tokens([END])
        inner.encode_special_tokens = True
        return inner


class Subwords(Tokenizer):
    """A tokenizer of the `tokenizers` package; if it has no end token, `<|endoftext|>` is added as the last entry."""

    def __init__(self, name: str, inner: Any):
        self.name, self._inner = name, inner
        inner.no_truncation()
        inner.no_padding()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        end = next((word for word in _ENDS if word in vocabulary), None)
        if end is None:
            inner.add_special_tokens([END])
            end, vocabulary = END, inner.get_vocab(with_added_tokens=True)
        # A document that contains the text of an end token must not end there.
        inner.encode_special_tokens = True
        self.end = vocabulary[end]
        # Not the number of entries, because published vocabularies have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def __reduce__(self) -> tuple[type[Subwords], tuple[str, Any]]:
        # The package does not store that the text of an end token is text.
        return Subwords, (self.name, self._inner)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([int(i) for i in ids if i != self.end], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._inner.to_str()

    def as_package(self) -> Any:
        return copy.deepcopy(self._inner)

    def _encode(self, text: str) -> np.ndarray:
        # One piece per call, because the package holds about a hundred bytes per token of a piece. Batch calls, because
        # only these release the GIL.
        found = [self._inner.encode_batch_fast([piece], add_special_tokens=False)[0].ids for piece in _pieces(text)]
        return np.concatenate([np.array(ids, self.dtype) for ids in found] or [np.empty(0, self.dtype)])


def is_tokenizer_file(spec: str) -> bool:
    """Whether a tokenizer is named by a file, which may be missing; raises for a folder."""
    if Path(spec).expanduser().is_dir():
        raise NormLabError(f"tokenizer {spec} is a folder; name the file in it, e.g. {Path(spec) / 'tokenizer.json'}")
    return spec.endswith((".json", ".json.gz", ".json.xz")) or Path(spec).expanduser().is_file()


def load_tokenizer(path: Path | str, name: str = "") -> Tokenizer:
    """Load a tokenizer file written by `save` or by the `tokenizers` package; may be compressed (.gz, .xz)."""
    path = Path(path)
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            text = file.read()
        if json.loads(text) == _BYTES_FILE:
            return Bytes()
        return Subwords(name or path.name.partition(".")[0], _tokenizers(str(path)).Tokenizer.from_str(text))
    except NormLabError:
        raise
    except OSError as error:
        raise NormLabError(f"tokenizer {path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the package raises bare Exceptions
        reason = str(error).splitlines()[0]
        raise NormLabError(f"tokenizer {path}: not a file of the tokenizers package ({reason})") from None


def load_from_hub(name: str) -> Tokenizer:
    """Load a tokenizer by its Hugging Face id; without a network that downloaded before."""
    package, what = _tokenizers(name), "expected 'bytes', 'bpe:N', a tokenizer file or a Hugging Face id"
    if not is_reachable():
        if (kept := cached_file(name, "tokenizer.json")) is not None:
            return load_tokenizer(kept, name)
        raise NormLabError(
            f"tokenizer {name!r} is neither a file nor a downloaded tokenizer here, and the hub cannot be reached; "
            f"{what}"
        )
    try:
        return Subwords(name, package.Tokenizer.from_pretrained(name))
    except NormLabError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NormLabError(
            f"tokenizer {name!r} is not a file here, and the hub did not give it ({reason}); {what}"
        ) from None


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE with `size` entries (256 bytes, an end token, merges); deterministic."""
    package = _tokenizers(f"bpe:{size}")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END],
        # All bytes, whether in the data or not, so that any text can be encoded and ties are broken the same way.
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    found = Subwords(f"bpe:{size}", inner)
    if found.vocab_size < size:
        have = found.vocab_size
        raise NormLabError(f"bpe:{size}: the data has only {have:,} entries in it; try bpe:{have} or more data")
    return found


def bpe_size(spec: str) -> int | None:
    """N of `bpe:N`; None for any other text."""
    kind, colon, digits = spec.partition(":")
    if (kind, colon) != ("bpe", ":"):
        return None
    if not digits.isdecimal() or len(digits) > 9 or not 257 <= int(digits) <= _MOST_ENTRIES:
        raise NormLabError(f"tokenizer {spec!r}: expected 257 to {_MOST_ENTRIES:,} entries, e.g. bpe:8192")
    return int(digits)


@contextmanager
def one_thread_a_call() -> Iterator[None]:
    """Turn off the package's own thread pool while several threads encode."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while cut := _CUT.search(text, start + _PIECE_CHARACTERS):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _byte_characters() -> list[str]:
    """The character for each byte in byte-level BPE: itself if printable, else the next one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def _tokenizers(what: str) -> Any:
    return import_optional("tokenizers", "bpe", f"tokenizer {what}")
