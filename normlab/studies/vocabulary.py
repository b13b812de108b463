"""Vocabulary of a study's tokenizer without its data, for the FLOPs of a plan: most of a small model is its head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from normlab.compare.config import CompareConfig
from normlab.ladders.config import LadderConfig

Experiment = TypeVar("Experiment", CompareConfig, LadderConfig)


@dataclass(frozen=True)
class _Vocabulary:
    """Placeholder tokenizer: its vocabulary size alone."""

    vocab_size: int


@dataclass(frozen=True)
class _Words:
    """Placeholder data: its tokenizer's vocabulary alone."""

    tokenizer: _Vocabulary


def with_vocabulary(config: Experiment) -> Experiment | None:
    """The configuration with the vocabulary that its tokenizer has; None if that is not known without the data."""
    tokenizer = getattr(config.base, "tokenizer", None)
    if tokenizer is None:
        return config
    size = _size(tokenizer, Path.cwd())
    if size is None:
        return None
    return dataclasses.replace(config, base=config.base.for_data(_Words(_Vocabulary(size))))


@cache
def _size(tokenizer: str, folder: Path) -> int | None:
    """Entries of a tokenizer whose file is relative to a folder. One from the hub is not loaded for a plan."""
    from normlab.data.tokenizer import Bytes, bpe_size, load_tokenizer

    if tokenizer == "bytes":
        return Bytes.vocab_size
    path = folder / Path(tokenizer).expanduser()
    return bpe_size(tokenizer) or (load_tokenizer(path).vocab_size if path.is_file() else None)
