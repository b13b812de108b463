"""The command `normlab schemes`. Importing this does not import torch."""

from __future__ import annotations

from typing import Annotated

import tyro


def schemes(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[SCHEME]")] = None,
    /,
    json: bool = False,
) -> None:
    """List the schemes, or show one in detail: equation, source, cost, known failures, claims that were tested.

    For example:
      normlab schemes
      normlab schemes "peri(step=0.1)"

    Args:
        name: A scheme or an alias, with or without options: geonorm, sandwich, "peri(step=0.1)"; or one in a file:
            highway.py:Highway.
        json: Print JSON.
    """
    from normlab.schemes.catalog import terminal

    terminal.schemes(as_json=json) if name is None else terminal.card(name, as_json=json)
