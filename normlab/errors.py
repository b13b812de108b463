"""Errors that a user can act on: one line saying what is wrong, what was expected and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NormLabError(Exception):
    """Bad input. The command line prints the message alone and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> NormLabError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), [*names, *aliases], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return NormLabError(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")
