"""The result of a check: what was measured, what it means, and what to change, in plain numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normlab.errors import NormLabError, unknown
from normlab.files import write_atomically
from normlab.stability import failing
from normlab.stability.procedure import Step as Answer
from normlab.stability.profile import Ladder, Number, Profile, When
from normlab.stability.records import from_plain, to_plain
from normlab.stability.rungs import Look, RateLadder, Step, Twin, Width
from normlab.stability.theory import Theory
from normlab.stability.thresholds import Thresholds
from normlab.stability.verdict import Level, Verdict, level

__all__ = ["SCHEMA", "Check", "Look", "RateLadder", "Step", "Subject", "Twin", "Width", "save", "writable"]

SCHEMA = 1
"""Version of the JSON; it grows when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was checked."""

    name: str
    """As the user named it."""
    kind: str
    """scheme, hugging face, factory, module or run."""
    depth: int
    """Blocks of the design itself; the gradient is judged at this depth."""
    width: int | None = None
    """Hidden width that was built."""
    parameters: int | None = None
    """Of the model at its own depth, as it was built."""
    scheme: str | None = None
    """The scheme with its options, where it is known."""
    notes: tuple[str, ...] = ()
    """What was changed before the check: "width 4096 -> 256 (--shrink 16)"."""
    unigram: Number = None
    """Entropy of the data's single tokens, nats: a loss above it has learnt nothing of the context."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A finished check."""

    target: Subject
    config: dict[str, Any] = field(default_factory=dict)
    """The options it ran with."""
    ladder: Ladder
    """Profiles over depths, before and after the burst."""
    widths: tuple[Width, ...] | None = None
    """The width ladder, where asked for."""
    rates: RateLadder | None = None
    """The learning-rate ladder, where asked for."""
    steps: tuple[Step, ...] | None = None
    """The residual-step ladder, where asked for."""
    theory: Theory | None = None
    """Predictions and bounds beside the measurement."""
    procedure: tuple[Answer, ...] = ()
    """The questions to a new architecture, answered."""
    verdicts: tuple[Verdict, ...]
    """One for each way in which a stack can fail."""
    remedies: tuple[str, ...] = ()
    """What to change, cheapest first."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """What the verdicts were held against."""
    notes: tuple[str, ...] = ()
    """What a reader must know: rungs that were left out to stay within the time."""
    curves: dict[str, tuple[Number, ...]] = field(default_factory=dict)
    """Loss of every step of the burst, by depth; first seed."""
    seconds: float = 0.0
    """How long it took."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what computed it."""
    command: tuple[str, ...] = ()
    """The command line, where there was one."""
    schema: Literal[1] = SCHEMA

    @property
    def level(self) -> Level:
        """The worst level of all verdicts."""
        return level(self.verdicts)

    @property
    def depth(self) -> int:
        """Blocks of the stack that is judged: the deepest one measured, up to the target's own depth."""
        depths = self.ladder.depths
        return max((depth for depth in depths if depth <= self.target.depth), default=depths[0])

    @property
    def trouble(self) -> list[Verdict]:
        """The verdicts that are not fine, failures first."""
        order = {"fail": 0, "warn": 1}
        found = [verdict for verdict in self.verdicts if verdict.level in order]
        return sorted(found, key=lambda verdict: order[verdict.level])

    def verdict(self, name: str) -> Verdict:
        """The verdict called so: "forward", "collapse", ..."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise unknown("verdict", name, {verdict.name for verdict in self.verdicts})

    def failed(self, fail_on: str | Iterable[str] = "any") -> list[Verdict]:
        """The verdicts that `--fail-on` asks about and that fired; see `normlab.stability.failing`."""
        return failing.fired(self.verdicts, fail_on)

    def profile(self, when: When | None = None) -> Profile:
        """The stack that is judged, first seed, by default after the burst where there was one.

        A stack that broke at once has no look after the burst; the deepest one that has stands for it.
        """
        when = when or self.ladder.snapshots[-1]
        depths = [depth for depth in self.ladder.depths if self.ladder.at(depth, when)]
        return self.ladder.at(max((depth for depth in depths if depth <= self.depth), default=depths[0]), when)[0]

    def table(self) -> str:
        """The card as plain text: what a terminal shows, without colour."""
        from normlab.stability.card import text

        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Check:
        """The check that `to_dict` wrote."""
        if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
            found = record.get("schema") if isinstance(record, Mapping) else None
            raise NormLabError(
                f"not a check of schema {SCHEMA} (found {found!r}); expected a file of normlab check --json"
            )
        return from_plain(cls, record, "check")

    def to_json(self) -> str:
        """One JSON object; its schema is `normlab.stability.schema`."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Check:
        """The check that `to_json` wrote."""
        try:
            return cls.from_dict(json.loads(text))
        except ValueError as error:
            raise NormLabError(f"not a check: torn, or not JSON ({error}); expected normlab check --json") from None

    def save(self, path: str | Path) -> Path:
        """Write the check as `.json`, or as an `.html` page; whole or not at all."""
        return save(path, {".json": self.to_json, ".html": self._page})

    def _page(self) -> str:
        from normlab.stability.page import page

        return page(self)


def save(path: str | Path, writers: Mapping[str, Callable[[], str]]) -> Path:
    """Write what the writer of the path's suffix returns."""
    path = Path(path)
    if path.suffix.lower() not in writers:
        raise NormLabError(f"{path} must end in {' or '.join(writers)}: the suffix says what to write")
    # Half of a surrogate pair cannot be written; the rest of that text can.
    write_atomically(path, writers[path.suffix.lower()]().encode("utf-8", "replace"))
    return path


def writable(path: str | Path, suffix: str) -> Path:
    """The path, if a file with this suffix can be written there: better to know before a minute of work than after."""
    path = Path(path)
    if path.suffix.lower() != suffix:
        raise NormLabError(f"{path} must end in {suffix}; try {path.with_suffix(suffix)}")
    if path.is_dir():
        raise NormLabError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise NormLabError(f"{path.parent} is no folder; make it first, or choose another one")
    if not os.access(path.parent, os.W_OK):
        raise NormLabError(f"{path.parent} cannot be written to; choose another folder")
    return path
