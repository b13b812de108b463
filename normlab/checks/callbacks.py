"""`Watch`: profile and judge every n-th step of any training loop.

    watch = normlab.checks.Watch(model, every=50, out="profiles.jsonl")
    for step, batch in enumerate(batches):
        with watch.step(step):
            loss = model(**batch).loss
            loss.backward()
            optimiser.step()
    watch.close()

A profile is judged as soon as its numbers have come from the device, while the loop goes on. A new verdict is logged
(logger `normlab.checks`). Between profiled steps an alarm watches for values that are not finite; after one the next
step is profiled, too.

Lines of `out`, one JSON object each:

    {"kind": "profile", "step": 50, "stack": "model.layers", "profile": {...}}        what `Profile.from_dict` reads
    {"kind": "verdict", "step": 50, "stack": "model.layers", "verdict": {...}}        a finding that is new
    {"kind": "event", "step": 7, "what": "nonfinite", "layer": "model.layers.3", "detail": "..."}

Of several processes only the first one measures; it never waits for another process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Verdict
from normlab.checks.ladder_records import Ladder
from normlab.errors import NormLabError
from normlab.probes.first_nonfinite import Nonfinite, NonfiniteAlarm
from normlab.probes.probe import Probe, probe
from normlab.probes.profile import Profile
from normlab.utils.files import file_error, writable

log = logging.getLogger("normlab.checks")


class Watch:
    """Monitor a training loop: measure and judge every n-th step, and name the first module that returns a NaN.

    Use `with watch.step():`, or `begin` and `end` where a loop has callbacks instead.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        out: str | Path | None = None,
        blocks: str | None = None,
        thresholds: Thresholds | None = None,
        unigram: float | None = None,
    ):
        if not isinstance(every, int) or every < 1:
            raise NormLabError(f"watch: every must be a whole number from 1 on, got {every}; try 50")
        self.model, self.every, self.blocks = model, every, blocks
        self.out = None if out is None else Path(out)
        self._profiles: dict[str, Profile] = {}
        self._verdicts: dict[str, list[Verdict]] = {}
        self._broken: Nonfinite | None = None
        self._limits, self._unigram = thresholds, unigram
        self._idle = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        if self.out is not None and not self._idle:
            # Now, and not from inside the loop: the first record is written at the end of its first step.
            writable(self.out, self.out.suffix.lower())
        self._alarm = NonfiniteAlarm(model, blocks)
        self._first: dict[str, Profile] = {}
        self._said: dict[tuple[str, str], str] = {}
        self._next = 0
        self._hooks: ExitStack | None = None
        self._look = Probe()
        # Computing ranks takes a CPU a tenth of a second, in which a GPU takes steps.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="normlab-watch")
        self._reading: Future[dict[str, Profile]] | None = None
        self._before_look = 0

    @property
    def profiles(self) -> dict[str, Profile]:
        """The last profiles, by stack. Waits until their numbers have reached the host."""
        self._hear(wait=True)
        return self._profiles

    @property
    def verdicts(self) -> dict[str, list[Verdict]]:
        """The verdicts on the last profiles. Waits for them likewise."""
        self._hear(wait=True)
        return self._verdicts

    @property
    def broken(self) -> Nonfinite | None:
        """Step and module of the first value that was not finite, as far as the host knows; never waits."""
        self._hear()
        return self._broken

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[Probe]:
        """One step of the loop: forward, backward and update. `number` counts updates made before; None: one more."""
        look = self.begin(number)
        try:
            yield look
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, number: int | None = None) -> Probe:
        """Begin a step. The returned probe takes losses that the model's own output does not hold: `record(loss=)`."""
        self.abandon()
        step = self._next if number is None else number
        self._next = step + 1
        self._hooks = ExitStack()
        self._hear()
        # A profile that has not arrived yet came first.
        alarmed = self._reading is None and self._goes_off()
        due = not self._idle and (alarmed or step % self.every == 0)
        self._look = self._hooks.enter_context(probe(self.model, blocks=self.blocks, step=step, active=due))
        if not due and not self._idle:
            self._alarm.listen(self._hooks)
            self._look.on_loss = self._alarm.tell
        return self._look

    def end(self) -> None:
        """End the step."""
        hooks, look = self._hooks, self._look
        if hooks is None:
            return
        self._hooks = None
        hooks.close()
        if look.active:
            self._take(look)
        elif not self._idle:
            self._alarm.send(look.step)

    def abandon(self) -> None:
        """Remove all hooks and discard the step, which did not come to its end."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            # As if the step had raised: half a step has no profile.
            hooks.__exit__(_Abandoned, _Abandoned(), None)

    def close(self) -> None:
        """End the loop: wait for what the last steps have recorded."""
        self.abandon()
        self._hear(wait=True)
        self._goes_off(wait=True)

    def _take(self, look: Probe) -> None:
        self._hear(wait=True)
        self._before_look = self._alarm.pending
        if look.is_there:
            self._keep(look.profiles)
        else:
            self._reading = self._reader.submit(lambda: look.profiles)

    def _hear(self, wait: bool = False) -> None:
        """Judge the last profiles, if they have arrived and were not judged yet."""
        if self._reading is not None and (wait or self._reading.done()):
            reading, self._reading = self._reading, None
            self._keep(reading.result())

    def _goes_off(self, wait: bool = False, most: int | None = None) -> bool:
        broken = self._alarm.poll(wait, most)
        if broken is None or self._broken is not None:
            return False
        self._report(broken)
        return True

    def _report(self, broken: Nonfinite) -> None:
        self._broken = broken
        detail = f"{broken.where} is the first that was not finite, at step {broken.step}"
        log.warning("normlab: %s", detail)
        self._write(
            {"kind": "event", "step": broken.step, "what": "nonfinite", "layer": broken.where, "detail": detail}
        )

    def _keep(self, profiles: dict[str, Profile]) -> None:
        self._profiles = profiles
        # The profile has waited for the device: the records of the steps before it are there, and came first.
        self._goes_off(wait=True, most=self._before_look)
        for stack, profile in profiles.items():
            self._write({"kind": "profile", "step": profile.step, "stack": stack, "profile": profile.to_dict()})
            if profile.nan_first is not None and self._broken is None:
                self._report(Nonfinite(profile.step, profile.nan_first.rpartition(" at step ")[0]))
            self._judge(stack, profile)

    def _judge(self, stack: str, profile: Profile) -> None:
        first = self._first.setdefault(stack, profile)
        both = [first, profile] if first.when != profile.when and first.depth == profile.depth else [profile]
        self._verdicts[stack] = judge_ladder(Ladder(tuple(both)), thresholds=self._limits, unigram=self._unigram)
        for verdict in self._verdicts[stack]:
            finding = "" if verdict.level == "ok" else verdict.finding
            if finding and self._said.get((stack, verdict.name)) != finding:
                log.warning("normlab: %s, %s: %s", stack, verdict.name, verdict.words)
                record = {"kind": "verdict", "step": profile.step, "stack": stack, "verdict": verdict.to_dict()}
                self._write(record)
            self._said[stack, verdict.name] = finding

    def _write(self, record: dict[str, Any]) -> None:
        if self.out is None:
            return
        try:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            raise file_error("write", error, self.out) from error


class _Abandoned(Exception):  # noqa: N818 (never raised to anybody)
    """Placeholder for the exception that ended a step."""
