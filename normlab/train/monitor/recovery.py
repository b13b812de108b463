"""Recovery from a bad training step: name the layer, save the batch, then stop, skip or roll back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from normlab.data import Batch
from normlab.train.monitor import trouble
from normlab.train.monitor.guard import StepVerdict
from normlab.utils.host_copy import HostCopy

if TYPE_CHECKING:
    from normlab.train.setup import Setup


class Taken(NamedTuple):
    """A training step whose loss and gradient norm may still be in transfer from the device."""

    step: int
    values: HostCopy
    """Loss and gradient norm."""
    parts: Sequence[Batch]
    threshold: float
    """The loss above which it is a spike."""


class Ended(Exception):  # noqa: N818  # not an error
    """Ends a run before its last step: on request, or because of a bad step."""

    def __init__(self, state: str, reason: str, *, diverged: int | None = None):
        super().__init__(reason)
        self.state, self.reason, self.diverged = state, reason, diverged


def handle(run: Setup, verdict: StepVerdict, taken: Taken) -> None:
    """Record the step and the layer at fault, save the batch, and follow the policy."""
    if run.guard.policy == "none":
        _let_be(run, verdict, taken)
        return
    if not run.lags:
        # Where the host lags, the gradient that is there by now is the next step's.
        run.optimiser.zero_grad(set_to_none=True)
    found = trouble.diagnose(run.model, taken.parts, run.group, run.autocast)
    detail = f"step {taken.step}: {verdict.detail}; {found}"
    run.journal.event(taken.step, verdict.kind, detail, layer=found.layer)
    trouble.keep(taken.parts, run.folder.trouble, taken.step, run.group.rank)
    if verdict.action == "stop":
        is_one_spike = verdict.kind == "spike" and run.guard.policy == "stop"
        raise Ended("failed", detail, diverged=None if is_one_spike else taken.step)
    run.meter.say(f"{detail}; {verdict.action}")
    if verdict.action == "rollback":
        _roll_back(run, taken.step)
    else:
        run.journal.event(taken.step, "skip", "the weights stay as they were")


def _let_be(run: Setup, verdict: StepVerdict, taken: Taken) -> None:
    """Record the step and go on, or end. No diagnosis: the update may have been applied, and its weights be NaN."""
    run.journal.event(taken.step, verdict.kind, f"step {taken.step}: {verdict.detail}")
    if verdict.action == "stop":
        raise Ended("failed", f"diverged at step {taken.step}: {verdict.detail}", diverged=taken.step)


def _roll_back(run: Setup, step: int) -> None:
    """Restore weights and optimiser from the last checkpoint; the data goes on after the bad batch."""
    found = run.checkpoints.load(run.model, run.optimiser)
    if found is None:
        run.journal.event(step, "skip", "there is no checkpoint to go back to yet")
        return
    run.graphs.forget()
    run.step, extra = found
    run.guard.rewind(extra["guard"])
    run.watch.load_state_dict(extra.get("watch", {}))
    run.meter.restart(run.step)
    run.journal.event(step, "rollback", f"from step {step} to step {run.step}")
    run.returns[run.step] += 1
    if run.returns[run.step] == run.guard.limit:
        raise Ended("failed", f"step {step}: rolled back to step {run.step} {run.guard.limit} times", diverged=step)
