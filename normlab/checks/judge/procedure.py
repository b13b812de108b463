"""The sanity check for a new architecture of arXiv 2510.09904, step by step, answered from the results of a check.

Every step is a question, what was done about it, one number and an answer. All of them are answered by a check that has
been run; a step that needs a part which was not run says how to run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from normlab.checks.judge import growth_laws
from normlab.checks.judge.growth import growth_level
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Level, Verdict, level, plain
from normlab.checks.ladder_records import Ladder, StepRung
from normlab.checks.theory.records import Theory
from normlab.probes.profile import Number, When


@dataclass(frozen=True, kw_only=True)
class ProcedureStep:
    """One step of the procedure: a question and its answer."""

    name: str
    question: str
    done: str
    """What was measured to answer it."""
    number: Number = None
    symbol: str = ""
    """Symbol of the number: "p", "G", ..."""
    answer: str
    level: Level = "ok"


def procedure(
    *,
    ladder: Ladder,
    theory: Theory | None,
    verdicts: Sequence[Verdict],
    steps: Sequence[StepRung] | None = None,
    thresholds: Thresholds | None = None,
    target: int | None = None,
) -> tuple[ProcedureStep, ...]:
    """The five steps. `target` is the depth that the gradient is judged at (none: the largest measured)."""
    limits = thresholds or Thresholds()
    return (
        _forward(ladder, theory, limits),
        _backward(ladder, theory, target, limits),
        _scale(theory),
        _training(ladder, verdicts, target, limits),
        _residual_step(steps),
    )


def _forward(ladder: Ladder, theory: Theory | None, limits: Thresholds) -> ProcedureStep:
    law = growth_laws.forward_law(ladder, ladder.snapshots[0], limits)
    return ProcedureStep(
        name="forward moments over depth",
        question="How does the size of the hidden state depend on depth before training?",
        done=f"{_rungs(ladder, law.when)}; RMS of the last state fitted as a power of the depth",
        number=law.p.exponent if law.p else None,
        symbol="p",
        answer=f"{_growth(law)}{_predicted(theory and theory.growth)}",
        level=growth_level(law.name),
    )


def _backward(ladder: Ladder, theory: Theory | None, target: int | None, limits: Thresholds) -> ProcedureStep:
    law = growth_laws.backward_law(ladder, ladder.snapshots[0], target, limits)
    return ProcedureStep(
        name="backward gains over depth",
        question="What is left of the gradient when it arrives at the first block?",
        done=f"{_rungs(ladder, law.when)}; G = ‖g₁‖/‖g_L‖ fitted as a power of the depth",
        number=None if law.value is None else plain(law.value),
        symbol="G",
        answer=f"{_gain(law)}{_predicted(theory and theory.backward)}{_worst_case(theory)}",
        level="fail" if law.name in ("vanishing", "exploding") else "ok",
    )


def _scale(theory: Theory | None) -> ProcedureStep:
    slopes = [row.slope for row in theory.scale_test if row.slope is not None] if theory else []
    tested = len({(row.block, row.branch) for row in theory.scale_test}) if theory else 0
    return ProcedureStep(
        name="scale test",
        question="Does a branch's gradient follow the size of its weights?",
        done=f"the last matrix of {tested} branches multiplied by four factors, one at a time" if tested else "not run",
        number=median(slopes) if slopes else None,
        symbol="slope",
        answer=theory.scale if theory and theory.scale else "not tested",
    )


def _training(ladder: Ladder, verdicts: Sequence[Verdict], target: int | None, limits: Thresholds) -> ProcedureStep:
    question = "Do both hold once the model is trained?"
    if "after" not in ladder.snapshots:
        answer = "not answered: nothing was trained, or the model broke in its first step; use --steps 30"
        return ProcedureStep(name="both after training", question=question, done="not run", answer=answer)
    forward, back = (
        growth_laws.forward_law(ladder, "after", limits),
        growth_laws.backward_law(ladder, "after", target, limits),
    )
    factor = growth_laws.moved(ladder)
    moved = "" if factor is None else f"; G changed {factor:.3g}-fold ({limits.gradient_moved:g} is the limit)"
    judged = [verdict for verdict in verdicts if verdict.name in ("unsteady", "collapse")]
    trouble = [verdict.finding for verdict in judged if verdict.level == "fail"]
    return ProcedureStep(
        name="both after training",
        question=question,
        done=f"{_rungs(ladder, 'after')} after {forward.step} optimiser steps",
        number=None if factor is None else plain(factor),
        symbol="change of G",
        answer=f"{_growth(forward)}; {_gain(back)}{moved}" + (f"; {' and '.join(trouble)}" if trouble else ""),
        level=_worse(growth_level(forward.name), "fail" if back.name in ("vanishing", "exploding") else "ok", judged),
    )


def _residual_step(rungs: Sequence[StepRung] | None) -> ProcedureStep:
    question = "Which residual step Δt suits it?"
    if not rungs:
        answer = "not answered: use --step-ladder, for designs that have a residual step"
        return ProcedureStep(name="residual step", question=question, done="not run", answer=answer)
    ended = [rung for rung in rungs if rung.after.loss is not None]
    best = min(ended, key=_loss, default=None)
    return ProcedureStep(
        name="residual step",
        question=question,
        done=f"Δt of {', '.join(f'{rung.step:g}' for rung in rungs)} at {rungs[0].depth} blocks, trained alike",
        number=best.step if best else None,
        symbol="Δt",
        answer=_by_loss(ended, best) if best else "no step ended with a finite loss",
        level="ok" if best else "fail",
    )


def _by_loss(ended: Sequence[StepRung], best: StepRung) -> str:
    others = [_rung_words(rung) for rung in ended if rung is not best]
    words = f"lowest loss with {_rung_words(best)}"
    if best.step == min(rung.step for rung in ended) and others:
        words += ", the smallest tried: a smaller one may do better, until the stack acts like a shallow one"
    return f"{words}; {'; '.join(others)}" if others else words


def _rung_words(rung: StepRung) -> str:
    read: list[tuple[str, Callable[[StepRung], Number]]] = [
        ("loss", lambda one: one.after.loss),
        ("RMS", lambda one: one.after.rms),
        ("G", lambda one: one.after.G),
    ]
    numbers = [f"{name} {value:.3g}" for name, get in read if (value := get(rung)) is not None]
    return f"Δt = {rung.step:g} ({', '.join(numbers)})"


def _loss(rung: StepRung) -> float:
    return math.inf if rung.after.loss is None else rung.after.loss


def _rungs(ladder: Ladder, when: When) -> str:
    depths = [depth for depth in ladder.depths if ladder.at(depth, when)]
    seeds = max(len(ladder.at(depth, when)) for depth in depths)
    shown = ", ".join(map(str, depths))
    return f"{shown} blocks" + (f", {seeds} seeds" if seeds > 1 else "")


def _growth(law: growth_laws.ForwardLaw) -> str:
    if law.broken is not None:
        return "exploding: a value is not finite"
    if law.p is None:
        return "growth not judged: it takes two depths that are deep enough"
    return f"{law.name}, RMS ∝ L^{law.p.exponent:.2f} from {law.depths[0]} to {law.depths[1]} blocks"


def _gain(law: growth_laws.BackwardLaw) -> str:
    if law.value is None:
        return "gradient not judged"
    power = f", G ∝ L^{law.fit.exponent:.2f}" if law.fit else ""
    size = f"G = {law.value:.3g}" if math.isfinite(law.value) else "a gradient is not finite"
    return f"{law.name}, {size} at {law.target} blocks{power}"


def _predicted(words: str | None) -> str:
    return f" (theory: {words})" if words else ""


def _worst_case(theory: Theory | None) -> str:
    """How far the gradient stays below the upper bound from the branches' Jacobians."""
    return f"; {theory.jacobians}" if theory and theory.jacobians else ""


def _worse(*found: Level | Sequence[Verdict]) -> Level:
    levels: list[Level] = [one if isinstance(one, str) else level(one) for one in found]
    return max(levels, key=("ok", "warn", "fail").index)
