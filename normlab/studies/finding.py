"""Finding: the verdict on a claim (reproduced, refuted, open) with its interval and statistical power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from normlab.utils.records import to_plain

Verdict = Literal["reproduced", "refuted", "open", "not run"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one claim. "open": the interval, a failure or missing runs leave it so; `notes` say which."""

    verdict: Verdict
    ours: str = ""
    """What was measured, in words, with its interval."""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    claimed: tuple[float | None, float | None] = (None, None)
    """Where the claim says that the true value lies, from and to; None: no end on that side."""
    runs: int = 0
    """Runs that the verdict rests on."""
    seeds: int = 0
    power: str = ""
    """What so many runs could have shown."""
    notes: tuple[str, ...] = ()
    parts: tuple[Finding, ...] = field(default=(), repr=False)
    """The findings that this one is made of, where there are several."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return to_plain(self)

    def unless(self, problems: Sequence[str]) -> Finding:
        """The same, but open where there are problems, which are then named."""
        if not problems:
            return self
        return replace(self, verdict="open", notes=(*self.notes, *problems))

    def noting(self, notes: Sequence[str]) -> Finding:
        return replace(self, notes=(*self.notes, *notes))


def combine_findings(parts: Sequence[Finding]) -> Finding:
    """A claim that must hold everywhere: refuted by one part, reproduced by all."""
    if len(parts) == 1:
        return parts[0]
    verdicts = [part.verdict for part in parts]
    whole: Verdict = "refuted" if "refuted" in verdicts else "open"
    whole = "reproduced" if verdicts and all(one == "reproduced" for one in verdicts) else whole
    return Finding(
        verdict=whole,
        ours="; ".join(part.ours for part in parts if part.ours),
        runs=sum(part.runs for part in parts),
        seeds=min((part.seeds for part in parts), default=0),
        power="; ".join(dict.fromkeys(part.power for part in parts if part.power)),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        parts=tuple(parts),
    )


def side(low: float | None, high: float | None, claimed: tuple[float | None, float | None]) -> Verdict:
    """Reproduced where the whole interval lies where the claim says, refuted where none of it does."""
    if low is None or high is None:
        return "open"
    first, last = claimed
    inside = (first is None or low >= first) and (last is None or high <= last)
    outside = (first is not None and high < first) or (last is not None and low > last)
    return "reproduced" if inside else "refuted" if outside else "open"
