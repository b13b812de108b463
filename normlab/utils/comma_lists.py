"""Options that hold a list in one argument, separated by commas: `--scheme pre,peri(step=0.1)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets: 'pre,peri(step=0.1,norm=layer)' has two parts."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def comma_list(of: Callable[[str], Any], example: str) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """Type annotation of a tuple that is one argument on the command line, so that it takes no later arguments."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=example,
        instance_from_str=lambda words: tuple(of(part) for part in split_commas(words[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )
