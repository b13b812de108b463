"""`--fail-on`: which findings end a check with exit code 1.

An entry names a finding ("exploding") or a verdict ("attention logits"). It fires where that verdict fails;
"dead depth:warn" fires at a warning already, and "any" or "any:warn" stand for all verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normlab.checks.judge.verdict import LEVELS, Level, Verdict
from normlab.errors import unknown

VERDICTS = frozenset(
    {"forward", "backward", "unsteady", "collapse", "dead depth", "attention", "attention logits", "update ratio"}
    | {"bf16 absorption", "headroom", "outliers", "uneven", "certificate", "norm drift"}
    | {"untrained", "leaks", "structure", "start", "mixing"}
)
"""Names of the verdicts."""

FINDINGS = frozenset(
    {"exploding", "super-linear", "shrinking", "vanishing", "unsteady", "collapse", "dead depth", "low entropy"}
    | {"large logits", "small updates", "large updates", "absorbed", "little headroom", "outliers", "uneven"}
    | {"certificate violated", "norm drift", "untrained", "detached", "sees the future", "mixes samples"}
    | {"no norm", "no final norm", "norm off", "skip gain", "echo", "high first loss", "not finite", "mixing gain"}
)
"""Findings that are not fine."""


def parse(entries: str | Iterable[str]) -> tuple[str, ...]:
    """Parse "exploding,vanishing" or a list of entries; raises for an unknown entry."""
    parts = [entry.split(",") for entry in ([entries] if isinstance(entries, str) else entries)]
    found = [" ".join(entry.split()) for part in parts for entry in part if entry.strip()]
    for entry in found:
        if _split(entry)[0] not in {"any", *VERDICTS, *FINDINGS}:
            raise unknown("finding to fail on", entry, {"any", *VERDICTS, *FINDINGS})
    return tuple(found)


def fired(verdicts: Sequence[Verdict], entries: str | Iterable[str]) -> list[Verdict]:
    """The verdicts that match an entry, in the order of the verdicts."""
    rules = [_split(entry) for entry in parse(entries)]
    return [verdict for verdict in verdicts if any(_fires(verdict, *rule) for rule in rules)]


def _split(entry: str) -> tuple[str, Level]:
    """(verdict or finding of an entry, level from which it counts)."""
    name = entry.removesuffix(":warn")
    return name.strip(), "fail" if name == entry else "warn"


def _fires(verdict: Verdict, name: str, level: Level) -> bool:
    named = name in ("any", verdict.name, verdict.finding)
    return named and LEVELS.index(verdict.level) >= LEVELS.index(level)
