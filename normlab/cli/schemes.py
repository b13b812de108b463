"""The verb `normlab schemes`. Importing it imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated

import tyro


def schemes(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    json: bool = False,
) -> None:
    """Print the table of schemes, or the card of one.

    Args:
        name: A scheme, an alias, or either with options: geonorm, sandwich, "peri(step=0.1)"; highway.py:Highway.
        json: Print JSON for other programs.
    """
    from normlab.schemes.catalog import terminal

    terminal.schemes(as_json=json) if name is None else terminal.card(name, as_json=json)
