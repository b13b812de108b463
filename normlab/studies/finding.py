"""Finding: the verdict on a claim (reproduced, refuted, open) with its interval and statistical power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from normlab.utils.records import to_plain

Verdict = Literal["reproduced", "refuted", "open", "unfinished", "not run"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one claim. "open": undecided because of the interval or failures; see `notes`."""

    verdict: Verdict
    ours: str = ""
    """The measured value with its interval, as text."""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    claimed: tuple[float | None, float | None] = (None, None)
    """Range of the true value according to the claim; None: unbounded on that side."""
    runs: int = 0
    """Number of runs that the verdict is based on."""
    seeds: int = 0
    power: str = ""
    """Statistical power, as text."""
    runs_to_decide: float | None = None
    """Runs in all that would decide an open claim, if means and scatter stay. Infinite: too many, or more of them would
    not; None: unknown."""
    settling: str = ""
    """What it would take to decide an open claim, as text."""
    notes: tuple[str, ...] = ()
    parts: tuple[Finding, ...] = field(default=(), repr=False)
    """Findings that this one combines, if there are several."""

    @property
    def is_verdict(self) -> bool:
        """Whether all runs of the study have ended."""
        return self.verdict not in ("unfinished", "not run")

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of plain values for JSON."""
        return to_plain(self)

    def unless(self, problems: Sequence[str]) -> Finding:
        """A copy with the verdict open and the problems as notes, if there are any; more such runs would not help."""
        if not problems:
            return self
        return replace(self, verdict="open", notes=(*self.notes, *problems), runs_to_decide=math.inf)

    def noting(self, notes: Sequence[str]) -> Finding:
        return replace(self, notes=(*self.notes, *notes))

    def placed(self, arm: str) -> Finding:
        """A copy whose notes name the arm that they are about."""
        return replace(self, notes=tuple(f"{arm}: {note}" for note in self.notes))


def combine_findings(parts: Sequence[Finding]) -> Finding:
    """Combine findings of a claim that must hold everywhere: refuted by one part, reproduced by all."""
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
        runs_to_decide=_runs_of_all(parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        parts=tuple(parts),
    )


def _runs_of_all(parts: Sequence[Finding]) -> float | None:
    """Runs that would decide every part."""
    runs = [part.runs_to_decide if part.verdict == "open" else part.runs for part in parts]
    return None if None in runs else sum(filter(None, runs))


def interval_verdict(low: float | None, high: float | None, claimed: tuple[float | None, float | None]) -> Verdict:
    """Compare an interval with the claimed range: reproduced if it is inside, refuted if it is outside, else open."""
    if low is None or high is None:
        return "open"
    first, last = claimed
    inside = (first is None or low >= first) and (last is None or high <= last)
    outside = (first is not None and high < first) or (last is not None and low > last)
    return "reproduced" if inside else "refuted" if outside else "open"
