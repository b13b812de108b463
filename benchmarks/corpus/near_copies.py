"""Near copies among documents, by the rule of the corpora in docs/texts.md: word 8-grams that one other has, too."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

WORDS = 8
"""Words in a gram."""
SAMPLED = 8
"""One gram of so many is looked at, by its hash: the same ones in every document."""
LIMIT = 0.35
"""A document with a larger share of its grams in a longer one is a near copy of it."""
MOST = 100
"""Documents that are remembered for a gram. In more than these stand only headers of licences and the like."""

_WORD = re.compile(rb"\w+")
# Odd numbers, by which sums of products modulo 2^64 differ where a word or the order of two does.
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, place + 1, 1 << 64) for place in range(WORDS)], np.uint64)
_MIXING = np.uint64(0xD6E8FEB86659FD93)


def near_copies(texts: Sequence[str]) -> np.ndarray:
    """Mask of the texts that are copies, or nearly, of a longer one (of two as long, the first) that is none itself.

    The longest come first: else a few lines that stand in a long text would make that a near copy of theirs.
    """
    grams = [sampled_grams(text) for text in texts]
    found, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *grams]), return_counts=True)
    repeated = set(found[counts > 1].tolist())
    kept_with: dict[int, list[int]] = {}
    copies = np.zeros(len(texts), bool)
    for number in sorted(range(len(grams)), key=lambda number: -len(texts[number])):
        own = grams[number]
        shared = [gram for gram in own.tolist() if gram in repeated]
        overlaps = Counter(chain.from_iterable(kept_with.get(gram, ()) for gram in shared))
        copies[number] = any(count > LIMIT * len(own) for count in overlaps.values())
        if not copies[number]:
            for gram in shared:
                if len(others := kept_with.setdefault(gram, [])) < MOST:
                    others.append(number)
    return copies


def sampled_grams(text: str) -> np.ndarray:
    """Hashes of some of the word 8-grams of a text, each once; at least one."""
    words = [zlib.crc32(word) for word in _WORD.findall(text.encode())]
    words += [0] * (WORDS - len(words))
    windows = np.lib.stride_tricks.sliding_window_view(np.array(words, np.uint64), WORDS)
    hashes = np.unique((windows * _FACTORS).sum(1, dtype=np.uint64) * _MIXING)
    sampled = hashes[hashes >> np.uint64(32) & np.uint64(SAMPLED - 1) == 0]
    return sampled if len(sampled) else hashes[:1]
