"""Errors for the user: one line that says what is wrong, what was expected and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NormLabError(Exception):
    """An error in the user's input. The command line prints only its message and exits with status 2."""


def unknown(kind: str, name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> NormLabError:
    """An error for an unknown name, with the closest known name as a suggestion."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), [*names, *aliases], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return NormLabError(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")
