"""Size: depth and width of a model of a ladder, written 12x768; and Target, a size and a budget: 16x1024:400M."""

from __future__ import annotations

import re
from dataclasses import dataclass

from normlab.errors import NormLabError
from normlab.utils.counts import parse_count


@dataclass(frozen=True, order=True)
class Size:
    """Shape of a model: blocks × width."""

    depth: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """The size from text like 12x768."""
        match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
        if match is None or not int(match[1]) or not int(match[2]):
            raise NormLabError(f"{text!r} is not a size; expected depth x width, e.g. 12x768")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}"


@dataclass(frozen=True)
class Target:
    """A size and a budget that nobody has trained yet, at which the gap is asked for."""

    size: Size
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target from text like 16x1024:400M."""
        size, colon, tokens = text.partition(":")
        if not colon:
            raise NormLabError(f"{text!r} is not a target; expected size:tokens, e.g. 16x1024:400M")
        found = cls(Size.parse(size), parse_count(tokens))
        if found.tokens < 1:
            raise NormLabError(f"target {text!r}: tokens must be positive; try {size}:400M")
        return found

    def __str__(self) -> str:
        return f"{self.size}:{self.tokens}"
