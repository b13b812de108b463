"""Rows whose field `restored` says that they were written anew from something else than their run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normlab.pages.numbers import join_names
from normlab.utils.text import counted


def restored_cautions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A caution for each way in which rows were restored: how many, of which schemes, and what their field says."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        if row.get("restored"):
            alike.setdefault(" ".join(str(row["restored"]).split()), []).append(row["label"])
    return [
        f"{len(labels)} of {counted(len(rows), 'run')} ({join_names(dict.fromkeys(labels))}) "
        f"{'was' if len(labels) == 1 else 'were'} restored {how.rstrip('.')}."
        for how, labels in alike.items()
    ]
