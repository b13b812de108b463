"""Aggregate the records of one file in bounded memory: loss curve, evaluations, profiles, alarms."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from normlab.pages.numbers import finite_or_none
from normlab.train.monitor.summary import digits
from normlab.watch.curve import LossCurve
from normlab.watch.profiles import read_profile

Record = dict[str, Any]

_EVALS = 500
"""Largest number of evaluations kept."""
_ALARMS = 50
"""Largest number of alarms kept, the newest."""

_LONGEST = 1000
"""Characters of an alarm's detail that are kept."""

EVENTS = {
    "nonfinite": ("fail", "not finite"), "stuck": ("fail", "stuck"), "spike": ("warn", "spike"),
    "skip": ("warn", "step skipped"), "rollback": ("warn", "rolled back"), "start": ("warn", "first loss too high"),
    "resume": ("info", "resumed"), "saved": ("info", "saved and stopped"),
}  # fmt: skip
"""(level, title) of an event of a run; unknown events are warnings."""


class History:
    """Summary of the records of metrics.jsonl, or of the file of `normlab.checks.Watch`, updated one by one."""

    def __init__(self) -> None:
        self.curve = LossCurve()
        self.evals: list[Record] = []
        self.profiles: dict[str, tuple[Record, Record]] = {}
        """First and newest profile, by stack."""
        self.alarms: deque[Record] = deque(maxlen=_ALARMS)
        self.counts: Counter[str] = Counter()
        """Alarms by level."""
        self.last: Record = {}
        """The newest step."""
        self.stuck: str | None = None
        """Message of the run when it was stuck."""
        self.recovered = False
        """Whether an evaluation after that was below the limit."""
        self._limit: float | None = None
        self._takes = {
            "step": self._step, "eval": self._eval, "profile": self._profile, "event": self._event,
            "verdict": self._verdict,
        }  # fmt: skip

    def take(self, record: Record) -> None:
        """Add a record; those of an unknown kind, or without a step, are left out."""
        step, add = record.get("step"), self._takes.get(str(record.get("kind")))
        if add is not None and isinstance(step, int) and not isinstance(step, bool):
            add(step, record)

    def _step(self, step: int, record: Record) -> None:
        self.last = record
        tokens = record.get("tokens")
        self.curve.add(step, tokens if isinstance(tokens, int) else None, record.get("loss"), record.get("grad_norm"))

    def _eval(self, step: int, record: Record) -> None:
        numbers = {name: digits(value) for name, value in record.items() if finite_or_none(value) is not None}
        # A run that was rolled back evaluates the same step again: the newer one counts.
        self.evals = [known for known in self.evals if known["step"] < step] + [{"loss": None, **numbers, "step": step}]
        loss = finite_or_none(record.get("loss"))
        if self.stuck is not None and self._limit is not None and loss is not None:
            self.recovered = loss <= self._limit
        if len(self.evals) > _EVALS:
            self.evals = self.evals[:-1:2] + self.evals[-1:]

    def _profile(self, step: int, record: Record) -> None:
        found, stack = read_profile(record), str(record.get("stack", ""))
        if found is not None:
            self.profiles[stack] = (self.profiles.get(stack, (found, found))[0], found)
        inner = record.get("profile")
        if isinstance(inner, dict) and _has_loss(inner):
            # A loop of the user's own has no step records: its loss is known where it was profiled.
            self._step(step, {"step": step, "loss": inner.get("loss")})

    def _event(self, step: int, record: Record) -> None:
        what, detail = str(record.get("what", "event")), str(record.get("detail") or "")
        if what == "stuck":
            self.stuck, self._limit, self.recovered = detail, finite_or_none(record.get("limit")), False
        self._alarm(step, *EVENTS.get(what, ("warn", what)), detail)

    def _verdict(self, step: int, record: Record) -> None:
        found = record.get("verdict")
        if isinstance(found, dict):
            what = f"{found.get('name', 'verdict')}: {found.get('finding', '')}"
            level = "fail" if found.get("level") == "fail" else "warn"
            self._alarm(step, level, what, str(found.get("words") or ""))

    def _alarm(self, step: int, level: str, what: str, detail: str) -> None:
        self.counts[level] += 1
        self.alarms.append({"step": step, "what": what, "level": level, "detail": detail[:_LONGEST]})

    @property
    def is_empty(self) -> bool:
        return not (self.last or self.evals or self.profiles or self.alarms)


def _has_loss(profile: Record) -> bool:
    """Whether a loss was measured: a number, or None that was not finite."""
    unfit = profile.get("unfit")
    return finite_or_none(profile.get("loss")) is not None or (isinstance(unfit, dict) and "loss" in unfit)
