"""View of a run: its row in the table as text, and the data of its plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normlab.pages.numbers import NONE, finite_or_none, fixed, format_count
from normlab.train.metrics import TITLES
from normlab.utils.text import counted, duration
from normlab.watch.history import History
from normlab.watch.status import Status
from normlab.watch.watched_run import WatchedRun


@dataclass(frozen=True)
class RunLine:
    """One run as a table row, for the page and the terminal."""

    name: str
    status: Status
    progress: str
    share: float | None
    """Share of the steps taken."""
    left: str
    """Time left."""
    loss: str
    validation: str
    """Loss of the last evaluation."""
    also: str
    """Other scores of that evaluation."""
    speed: str
    quiet: str
    """Time since the last line."""
    alarms: str


def run_line(name: str, run: WatchedRun) -> RunLine:
    """The current table row of a run."""
    history, found = run.history, run.status
    step, of = finite_or_none(history.last.get("step")), run.steps
    return RunLine(
        name=name,
        status=found,
        progress=NONE if step is None else f"{step:,}" + (f" of {of:,}" if of else " steps"),
        share=min(1.0, step / of) if step is not None and of else None,
        left=_left(run, step, of) if found.state in ("training", "stuck") else "",
        loss=_loss(history),
        validation=fixed(history.evals[-1]["loss"]) if history.evals else NONE,
        also=_also(history),
        speed=format_count(history.last.get("tokens_per_s")),
        quiet=NONE if all(one.is_empty for one in run.histories) else f"{duration(run.quiet)} ago",
        alarms=_alarms(run),
    )


def details(run: WatchedRun) -> dict[str, Any]:
    """The plots and alarms of a run, as plain values."""
    history = run.history
    return {
        "curve": history.curve.columns(),
        "evals": {name: [one.get(name) for one in history.evals] for name in ("step", "tokens", "loss")},
        "stacks": [
            {"name": stack, "first": first, "newest": newest}
            for one in run.histories
            for stack, (first, newest) in one.profiles.items()
        ],
        "alarms": sorted((a for one in run.histories for a in one.alarms), key=lambda alarm: -alarm["step"]),
    }


def _left(run: WatchedRun, step: float | None, of: int | None) -> str:
    pace = run.seconds_a_step
    return f"{duration((of - step) * pace)} left" if step is not None and of and of > step and pace else ""


def _loss(history: History) -> str:
    if not history.last:
        return NONE
    found = finite_or_none(history.last.get("loss"))
    return "not finite" if found is None else fixed(found)


def _also(history: History) -> str:
    newest = history.evals[-1] if history.evals else {}
    return ", ".join(
        f"{title.lower()} {fixed(newest[name])}" for name, title in TITLES.items() if name != "loss" and name in newest
    )


def _alarms(run: WatchedRun) -> str:
    grave, warnings = (sum(one.counts[level] for one in run.histories) for level in ("fail", "warn"))
    said = [counted(grave, "failure")] * (grave > 0) + [counted(warnings, "warning")] * (warnings > 0)
    return ", ".join(said) or "none"
