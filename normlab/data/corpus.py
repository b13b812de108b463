"""`prepare`: tokenise text and split it into training and validation documents."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normlab.data.cache import TokenCache, cache_root, cached_tokenizer, cached_tokens
from normlab.data.sources import open_source, open_sources
from normlab.data.tokenizer import Tokenizer
from normlab.errors import NormLabError
from normlab.utils.machine import cores


@dataclass(frozen=True)
class Tokens:
    """Documents of one split. `ids[starts[i] : starts[i] + lengths[i]]` is document i with its end token."""

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    n_bytes: int
    fingerprint: str

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.starts)

    @property
    def n_tokens(self) -> int:
        """Number of tokens, with one end token per document."""
        return int(self.lengths.sum())

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token; end tokens count as tokens without bytes."""
        return self.n_bytes / self.n_tokens

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Convert a mean loss in nats per token, end tokens included, to bits per byte of text.

        Exact if the mean is over every token once, as in `evaluation_batches`; a mean over some of the tokens is used
        as an estimate for all.
        """
        return nats_per_token / self.bytes_per_token / math.log(2)

    def facts(self) -> dict[str, Any]:
        """A summary for reports, ready for JSON."""
        return {"documents": self.n_documents, "tokens": self.n_tokens, "bytes": self.n_bytes}


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and their tokenizer."""

    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    source: str
    val_sets: Mapping[str, Tokens] = field(default_factory=dict)
    """Further validation sets by name."""

    @property
    def fingerprint(self) -> str:
        """A hash; equal for two corpora with the same tokens in the same splits."""
        sets = [part for name, tokens in self.val_sets.items() for part in (name, tokens.fingerprint)]
        return _hash(self.train.fingerprint, self.val.fingerprint, *sets)

    def facts(self) -> dict[str, Any]:
        """A summary for reports, ready for JSON."""
        tokenizer = {"name": self.tokenizer.name, "vocab_size": self.tokenizer.vocab_size}
        sides: dict[str, Any] = {"train": self.train.facts(), "val": self.val.facts()}
        if self.val_sets:
            sides["val_sets"] = {name: tokens.facts() for name, tokens in self.val_sets.items()}
        return {"source": self.source, "fingerprint": self.fingerprint, "tokenizer": tokenizer, **sides}

    def describe(self) -> str:
        """A summary in one line."""
        tokenizer = f"{self.tokenizer.name} ({self.tokenizer.vocab_size:,} entries)"
        sides = {"train": self.train, "validation": self.val, **self.val_sets}
        shown = "; ".join(f"{name} {_shown(tokens)}" for name, tokens in sides.items())
        return f"{self.source}; {tokenizer}; {shown}"


def prepare(
    data: Sequence[str],
    *,
    tokenizer: str = "bytes",
    val_data: Sequence[str] = (),
    val_fraction: float = 0.02,
    val_sets: Mapping[str, str] | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Corpus:
    """Tokenise `data` (see `open_source`) into a memory-mapped cache and split it into training and validation.

    The split of a document depends on its content alone: whether its SHA-256, read as a fraction, is below
    `val_fraction`. Order, file names and other documents do not matter, and copies stay together. If that leaves a
    split empty, the document with the nearest hash moves there; a single document is split into its beginning and its
    last `val_fraction` of tokens. With `val_data` nothing is split: that is the validation data, and documents that
    occur in both are removed from training. `val_sets` are further validation sets by name, each one source; their
    documents are removed from training in the same way.

    `tokenizer` is `bytes`, `bpe:N` (trained on all of `data`, not on `val_data`), a file or a Hugging Face id.
    """
    if workers is not None and workers < 1:
        raise NormLabError(f"workers must be at least 1, got {workers}; leave it out to use every core")
    if not val_data and not 0.0 < val_fraction < 1.0:
        raise NormLabError(f"val_fraction must lie between 0 and 1, got {val_fraction}; try 0.02 or name val_data")
    root, source = cache_root(cache), open_sources(data)
    options = {"workers": workers or cores(), "progress": progress}
    apart_source = open_sources(val_data) if val_data else None
    set_sources = {name: open_source(spec) for name, spec in (val_sets or {}).items()}
    words = cached_tokenizer(tokenizer, source, root, progress=progress)
    tokens = cached_tokens(source, words, root, **options)
    caches = {name: cached_tokens(one, words, root, **options) for name, one in set_sources.items()}
    sets = {name: _whole(cache) for name, cache in caches.items()}
    free = _free_of(tokens, list(caches.values()))
    if apart_source is None:
        train, val = _split(tokens, words, val_fraction, free)
    else:
        apart = cached_tokens(apart_source, words, root, **options)
        free = _Free(free.chosen & ~np.isin(tokens.digests, apart.digests), (apart.key, *free.names))
        train, val = _side(tokens, free.chosen, "train", *free.names), _whole(apart)
    if not train.n_documents:
        raise NormLabError(
            "every document of data is in val_data or val_sets too: nothing is left to train on; name other files"
        )
    return Corpus(train, val, words, source.describe(), sets)


class _Free(NamedTuple):
    """The documents that may be trained on, and what was removed, for the fingerprint."""

    chosen: np.ndarray
    names: tuple[str, ...] = ()


def _free_of(cache: TokenCache, others: Sequence[TokenCache]) -> _Free:
    """The documents of a cache that occur in none of the others."""
    found = np.concatenate([cache.digests[:0], *(other.digests for other in others)])
    chosen = ~np.isin(cache.digests, found)
    # Where nothing is removed, training data and fingerprint are those without the others.
    return _Free(chosen, () if chosen.all() else tuple(other.key for other in others))


def _split(cache: TokenCache, tokenizer: Tokenizer, fraction: float, free: _Free) -> tuple[Tokens, Tokens]:
    different = np.unique(cache.digests)
    if len(different) == 1 and free.chosen.all():
        return _cut(cache, tokenizer, fraction)
    chosen = held_out(cache.digests, fraction)
    # The number of held-out documents determines which ones: those with the lowest digests.
    count = str(chosen.sum())
    train = _side(cache, ~chosen & free.chosen, "train", count, *free.names)
    return train, _side(cache, chosen, "val", count)


def held_out(digests: np.ndarray, fraction: float) -> np.ndarray:
    """Mask of the items held out for validation: those whose digest, read as a fraction, is below `fraction`.

    Always the lowest and never the highest digest, so that neither split is empty.
    """
    different = np.unique(digests)
    limit = min(max(int(fraction * 2.0**64), int(different[0]) + 1), int(different[-1]))
    return digests < np.uint64(limit)


def _side(cache: TokenCache, chosen: np.ndarray, *names: str) -> Tokens:
    starts, stops = cache.starts[:-1][chosen], cache.starts[1:][chosen]
    return Tokens(cache.tokens, starts, stops - starts, int(cache.bytes[chosen].sum()), _hash(cache.key, *names))


def _whole(cache: TokenCache) -> Tokens:
    return _side(cache, np.ones(len(cache.digests), bool), "val")


def _cut(cache: TokenCache, tokenizer: Tokenizer, fraction: float) -> tuple[Tokens, Tokens]:
    """Split one document into its beginning and its end, at a character boundary."""
    if len(cache.digests) > 1:
        raise NormLabError("all documents are the same text: nothing can be held out; name other data or val_data")
    end = int(cache.starts[-1])
    cut = end - max(1, round(fraction * end))
    tail = tokenizer.decode(cache.tokens[cut:end])
    while tail.startswith("\ufffd") and cut < end - 1:
        cut += 1
        tail = tokenizer.decode(cache.tokens[cut:end])
    if cut < 1:
        raise NormLabError(f"one document of {end} tokens cannot be split; name more data or val_data")
    tail_bytes = len(tail.encode("utf-8"))
    head = _range(cache, 0, cut, int(cache.bytes[0]) - tail_bytes, "train")
    return head, _range(cache, cut, end, tail_bytes, "val")


def _range(cache: TokenCache, start: int, stop: int, n_bytes: int, name: str) -> Tokens:
    return Tokens(
        cache.tokens,
        np.array([start]),
        np.array([stop - start]),
        n_bytes,
        _hash(cache.key, name, str(start), str(stop)),
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _shown(tokens: Tokens) -> str:
    return f"{tokens.n_tokens:,} tokens, {tokens.n_documents:,} documents, {tokens.n_bytes / 1e6:,.1f} MB"
