"""State of a run in words, from its status.json and the time since its last line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from normlab.pages.numbers import finite_or_none
from normlab.train.monitor.stuck import has_recovered
from normlab.utils.text import duration

State = Literal["starting", "training", "silent", "stuck", "diverged", "failed", "stopped", "finished"]

TROUBLE: tuple[State, ...] = ("silent", "stuck", "diverged", "failed")

SILENCE = 120.0
"""Seconds without a line after which a run in training is called silent."""
_STEPS = 30
"""Or as long as so many steps take, if that is longer: evaluations and checkpoints take several."""
_GAPS = 3
"""Or so many times the longest gap seen: a folder may be synchronised every few minutes only."""


@dataclass(frozen=True)
class Status:
    """The state of a run, in one word and in words, and why."""

    state: State
    words: str
    reason: str = ""


def status(
    stored: Mapping[str, Any],
    *,
    stuck: str | None,
    recovered: bool = False,
    empty: bool,
    quiet: float,
    patience: float,
) -> Status:
    """`stored` is the content of status.json; `quiet` are the seconds since the last line.

    The mark of a stuck run stays where it has recovered, as in a comparison; the words say so.
    """
    result, reason = stored.get("result"), str(stored.get("reason") or "")
    result = result if isinstance(result, Mapping) else {}
    match stored.get("state"):
        case "done":
            return _stuck_at_end(result, stuck) if result.get("stuck") else _FINISHED
        case "stuck":
            return Status("stuck", "stuck, stopped early", reason)
        case "stopped":
            return Status("stopped", "stopped", reason)
        case "failed":
            at = result.get("diverged")
            return Status("failed", "failed", reason) if at is None else Status("diverged", _diverged(at), reason)
        case _:
            return _running(stuck, recovered, empty, quiet, patience)


_FINISHED = Status("finished", "finished")


def _diverged(step: Any) -> str:
    return f"diverged at step {step}"


def _stuck_at_end(result: Mapping[str, Any], stuck: str | None) -> Status:
    names = ("unigram_entropy", "loss", "stuck_at", "steps")
    entropy, loss, at, steps = (finite_or_none(result.get(name)) for name in names)
    if entropy is None or loss is None or steps is None or not has_recovered(entropy, loss, at, steps):
        return Status("stuck", "finished, but stuck", stuck or "")
    return Status("stuck", "finished, but was stuck", stuck or "")


def _running(stuck: str | None, recovered: bool, empty: bool, quiet: float, patience: float) -> Status:
    if quiet > patience:
        why = "its process may have ended, be evaluating or be saving, or the folder is no longer synchronised"
        return Status("silent", f"no new line for {duration(quiet)}", why)
    if stuck is not None:
        return Status("stuck", "was stuck, training" if recovered else "stuck, still training", stuck)
    return Status("starting", "starting") if empty else Status("training", "training")


def patience(seconds_a_step: float | None, longest_gap: float) -> float:
    """Seconds without a new line after which a run is shown as silent."""
    return max(SILENCE, _STEPS * (seconds_a_step or 0.0), _GAPS * longest_gap)
