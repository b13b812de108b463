"""Small corpora for tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from normlab.data import Tokens

END = 256


def tokens_of(lengths: Sequence[int], *, fingerprint: str = "test") -> Tokens:
    """Documents of these lengths (end included) whose tokens are all different, so that each says where it stood."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(1000, 1000 + starts[-1], dtype=np.uint32)
    ids[starts[1:] - 1] = END
    return Tokens(ids, starts[:-1], np.diff(starts), n_bytes=int(starts[-1]) - len(lengths), fingerprint=fingerprint)


def write_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)), encoding="utf-8"
    )
    return path
