"""`normlab.check`: train bursts over depths, widths and rates, compare them with theory, judge, and suggest remedies.

report = normlab.check("peri(step=0.1)")
report = normlab.check(model, batch=batch, loss_fn=lambda model, batch: ...)
report.verdicts, report.table(), report.save("page.html")
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from normlab.checks.config import CheckConfig
from normlab.checks.gentler_rate import in_doubt, second_opinion
from normlab.checks.judge.ladder_verdicts import judge_ladder
from normlab.checks.judge.procedure import procedure
from normlab.checks.judge.remedies import remedies
from normlab.checks.judge.structure import start_verdict, structural
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import LEVELS, Verdict, level, worst
from normlab.checks.ladder_records import Ladder, RateLadder, StepRung, WidthRung
from normlab.checks.ladders import DepthLadder, depth_ladder, step_ladder, width_ladder
from normlab.checks.learning_rates import rate_ladder, with_reference
from normlab.checks.progress import CheckProgress
from normlab.checks.result import Check, Subject
from normlab.checks.structure.inspect import Structure, inspect_start, inspect_structure
from normlab.checks.theory.analysis import theory
from normlab.checks.theory.records import Theory
from normlab.errors import NormLabError, unknown
from normlab.models.memory_check import check_memory
from normlab.probes.profile import Profile
from normlab.probes.start import Start
from normlab.schemes.contract.scheme import Scheme
from normlab.targets import Target, resolve
from normlab.targets.tasks import TokenTask
from normlab.utils.records import to_plain
from normlab.utils.versions import versions

_GROWTH = ("forward", "backward")
"""Verdicts on the whole depth ladder; all others are on the deepest stack up to the target's own depth."""


_SCORES = 6
"""Matrices of scores that are kept at least, for one head."""

_LONG = 1024
"""Tokens of a sequence above which a check takes minutes on a few cores."""


class SlowCheck(UserWarning):
    """Warning: sequences are so long that a check takes many times as long as usual."""


Checkable = str | Path | nn.Module | Scheme | Callable[..., Any]
"""Anything that can be checked; see `normlab.targets.resolve`."""


def check(
    target: Checkable | Target,
    *,
    batch: Any = None,
    loss_fn: Any = None,
    config: CheckConfig | None = None,
    progress: bool = False,
    command: Sequence[str] = (),
    **options: Any,
) -> Check:
    """Check whether activations or gradients of a deep Transformer explode, vanish or collapse, and in which blocks.

    The target is a scheme, a published model or its configuration, a function of depth and width, a run folder, or a
    live module with a batch, which is restored afterwards.

        report = normlab.check("peri(step=0.1)", depths=(12, 24))
        report.level  # "ok", "warn" or "fail"
        print(report.table())

    Options are the fields of `CheckConfig`: `depths`, `steps`, `seeds`, `lr_ladder`, ...; they replace those of
    `config`. `progress` shows a progress bar on standard error.
    """
    config = config_of(options, config)
    if config.coordinates:
        raise NormLabError("a coordinate check has a result of its own; call normlab.check_coordinates")
    found = target if isinstance(target, Target) else prepare(target, config, batch=batch, loss_fn=loss_fn)
    check_length(found)
    with CheckProgress(found.name, progress=progress) as display:
        return _Session(found, config, display).run(command)


def check_length(target: Target) -> None:
    """Raise where the derivatives of attention do not fit into memory, or say that they will take long.

    They are taken of softmax written out, which keeps several matrices of tokens by tokens, for every head.
    """
    task = target.task
    if not isinstance(task, TokenTask):
        return
    scores = 4 * task.batch_size * task.length**2
    what = f"a check with {task.batch_size} × {task.length:,} tokens"
    check_memory(_SCORES * scores, target.device, what, "a smaller --length or --batch-size")
    if task.length > _LONG:
        seconds = "time and memory grow with the square of --length, and --max-seconds does not count one size alone"
        warnings.warn(f"{what}: {seconds}; {_LONG:,} tokens are enough for most designs", SlowCheck, stacklevel=3)


def prepare(target: Checkable, config: CheckConfig, *, batch: Any = None, loss_fn: Any = None) -> Target:
    """Make the target that the configuration names; raises if it cannot be checked."""
    return resolve(
        target,
        batch=batch,
        loss_fn=loss_fn,
        data=config.data,
        length=config.length,
        batch_size=config.batch_size,
        width=config.width,
        shrink=config.shrink,
        weights=config.weights,
        blocks=config.blocks,
        device=config.device,
        dtype=config.dtype,
    )


def share_reference(first: Check, second: Check) -> tuple[Check, Check]:
    """Use the lower reference loss of two checks for the learning-rate ladders of both."""
    a, b = first.rates, second.rates
    if a is None or b is None:
        return first, second
    lower = min(a, b, key=lambda ladder: ladder.reference)
    shared = [with_reference(ladder, lower.reference, lower.reference_from) for ladder in (a, b)]
    return dataclasses.replace(first, rates=shared[0]), dataclasses.replace(second, rates=shared[1])


class _Session:
    """A check in progress."""

    def __init__(self, target: Target, config: CheckConfig, tell: Callable[[str], None]):
        self.target, self.config, self.tell = target, config, tell
        self.start = time.perf_counter()
        self.theory: Theory | None = None
        self.structure: list[Structure] = []
        self.starts: list[Start] = []
        self.depth = own_depth(target, config)
        self.notes: list[str] = []

    def run(self, command: Sequence[str]) -> Check:
        found = depth_ladder(self.target, self.config, self.tell, own_depth=self.depth, inspect=self._inspect)
        self.notes += found.notes
        shown, verdicts = self._judge(found)
        wiring = self._structural(found)
        if level(wiring) != "fail":
            # A fault in the wiring is no matter of the rate.
            verdicts = self._reconsider(found, verdicts)
        verdicts = [*wiring, *self._start(), *verdicts]
        steps = self._steps(found)
        return Check(
            target=self._subject(found),
            config=to_plain(self.config),
            ladder=shown,
            widths=self._widths(found),
            rates=self._rates(found),
            steps=steps,
            theory=self.theory,
            procedure=procedure(ladder=shown, theory=self.theory, verdicts=verdicts, steps=steps, target=self.depth),
            verdicts=tuple(verdicts),
            remedies=tuple(remedy.words for remedy in remedies(verdicts)),
            notes=tuple(self.notes),
            starts=tuple(self.starts),
            curves=found.curves,
            versions=versions(),
            command=tuple(command),
            seconds=time.perf_counter() - self.start,
        )

    def _inspect(self, model: nn.Module, profile: Profile) -> None:
        self.tell(f"theory at {profile.depth} blocks")
        before = None if profile.when == "before" else self.theory
        self.theory = theory(self.target, model, profile, before=before)
        if profile.when == "before":
            self.tell("norms, skips and leaks")
            self.structure = inspect_structure(self.target, model, Thresholds(), profile.seed)

    def _judge(self, found: DepthLadder) -> tuple[Ladder, list[Verdict]]:
        """(the ladder to show, the worst verdict of each kind over all stacks)."""
        judged = {name: self._judge_stack(ladder, found) for name, ladder in found.ladders.items()}
        # The first of the worst: stacks come with the largest first.
        shown = max(judged, key=lambda name: LEVELS.index(level(judged[name])))
        if len(judged) > 1:
            self.notes.append(
                f"{len(judged)} stacks: {', '.join(judged)}; shown is {shown}, verdicts are the worst of all"
            )
            judged = {name: [_named(verdict, name) for verdict in verdicts] for name, verdicts in judged.items()}
        merged = [worst(same) for same in zip(*(reversed(judged.values())), strict=True)]
        return found.ladders[shown], [*merged, *(self.theory.verdicts() if self.theory else [])]

    def _judge_stack(self, ladder: Ladder, found: DepthLadder) -> list[Verdict]:
        main = next(iter(found.ladders.values()))
        # Stacks grow together: one that is half as deep as the main one has half the depth to be judged at.
        depth = max(1, round(self.depth * ladder.depths[-1] / main.depths[-1]))
        own = Ladder(tuple(p for p in ladder.profiles if p.depth <= depth) or ladder.profiles)
        whole, alone = (judge_ladder(one, target=depth, unigram=self.target.unigram) for one in (ladder, own))
        return [a if a.name in _GROWTH else b for a, b in zip(whole, alone, strict=True)]

    def _structural(self, found: DepthLadder) -> list[Verdict]:
        trace = found.bursts[self._judged_depth(found)][0].gradients
        return structural(self.structure, trace, Thresholds(), has_head=self.target.task.has_head)

    def _start(self) -> list[Verdict]:
        """The verdict on the initial loss, if the model has a head."""
        if self.config.start_size == "none":
            return []
        self.tell("the first loss at its real width")
        self.starts, missing, fresh = inspect_start(self.target, self.config.start_size, self.depth)
        verdict = start_verdict(self.starts, missing, Thresholds(), fresh=fresh)
        return [] if verdict is None else [verdict]

    def _reconsider(self, found: DepthLadder, verdicts: list[Verdict]) -> list[Verdict]:
        """The verdicts after a burst at a lower rate, if something failed, the rate was automatic and time is left."""
        depth = self._judged_depth(found)
        run = found.bursts[depth][0]
        left = self.config.max_seconds - (time.perf_counter() - self.start)
        if self.config.lr != "auto" or run.seconds > left or not in_doubt(verdicts, run, self.target.unigram):
            return verdicts
        self.tell(f"{depth} blocks at a gentler rate")
        asked = depth if "depth" in self.target.resizable else None
        return second_opinion(self.target, run, verdicts, depth=asked, steps=self.config.burst_steps)

    def _judged_depth(self, found: DepthLadder) -> int:
        """The largest measured depth up to the depth that is judged."""
        return max((depth for depth in found.bursts if depth <= self.depth), default=min(found.bursts))

    def _widths(self, found: DepthLadder) -> tuple[WidthRung, ...] | None:
        if not self.config.wants_widths:
            return None
        rungs, notes = width_ladder(self.target, self.config, self.tell, depth=_second(found))
        self.notes += notes
        return tuple(rungs) or None

    def _rates(self, found: DepthLadder) -> RateLadder | None:
        if not self.config.lr_ladder:
            return None
        ladder, notes = rate_ladder(self.target, self.config, self.tell, depth=_second(found))
        self.notes += notes
        return ladder

    def _steps(self, found: DepthLadder) -> tuple[StepRung, ...] | None:
        if not self.config.step_ladder:
            return None
        rungs, notes = step_ladder(self.target, self.config, self.tell, depth=_second(found, from_top=True))
        self.notes += notes
        return tuple(rungs) or None

    def _subject(self, found: DepthLadder) -> Subject:
        target = self.target
        depth = self._judged_depth(found)
        return Subject(
            name=target.name,
            kind=target.kind,
            depth=self.depth,
            width=target.width,
            parameters=found.bursts[depth][0].parameters if depth == self.depth else None,
            scheme=None if target.scheme is None else target.scheme.label,
            notes=target.notes,
            unigram=target.unigram,
        )


def own_depth(target: Target, config: CheckConfig) -> int:
    """The depth to judge at: the design's own, or a larger requested one; for a scheme, the largest requested."""
    if config.depths is None:
        return target.depth
    deepest = max(config.depths)
    return deepest if target.kind == "scheme" else max(deepest, target.depth)


def config_of(options: dict[str, Any], config: CheckConfig | None = None) -> CheckConfig:
    """Build a configuration from options, by default over that of `config`; unknown names raise."""
    known = {spec.name for spec in dataclasses.fields(CheckConfig)}
    for name in options:
        if name not in known:
            raise unknown("option of a check", name, known)
    return dataclasses.replace(config or CheckConfig(), **options)


def _named(verdict: Verdict, stack: str) -> Verdict:
    return dataclasses.replace(verdict, words=f"{stack}: {verdict.words}")


def _second(found: DepthLadder, *, from_top: bool = False) -> int:
    """The second smallest or second largest depth; the only one if there is one."""
    depths = sorted(found.bursts, reverse=from_top)
    return depths[min(1, len(depths) - 1)]
