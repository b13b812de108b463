"""Tokens of a batch of text, and how they are made: parse, tokenise, hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from normlab.data.readers import TextChunk
from normlab.data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """Tokens of consecutive documents, each with an end token, and lengths, bytes and digests of the documents."""

    ids: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    digests: np.ndarray
    taken: int


def encode_batch(chunks: Sequence[TextChunk], tokenizer: Tokenizer) -> Encoded:
    """Parse, tokenise and hash the documents of some chunks, in their order."""
    ids, lengths, sizes, digests = [], [], [], []
    for document in (document for chunk in chunks for document in chunk.parse()):
        raw = document.text.encode("utf-8")
        found = tokenizer.encode(document.text)
        ids += [found, np.array([tokenizer.end], tokenizer.dtype)]
        lengths.append(len(found) + 1)
        sizes.append(len(raw))
        digests.append(int.from_bytes(hashlib.sha256(raw).digest()[:8], "big"))
    return Encoded(
        np.concatenate(ids or [np.empty(0, tokenizer.dtype)]),
        np.array(lengths, np.int64),
        np.array(sizes, np.int64),
        np.array(digests, np.uint64),
        sum(chunk.taken for chunk in chunks),
    )
