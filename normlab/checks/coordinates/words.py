"""Headline, sentences and labels of a coordinate check: shared by the card and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from normlab.checks.coordinates.records import Axis, AxisName, CoordinateCheck, Finding, Trend
from normlab.checks.coordinates.trace import LAST
from normlab.checks.judge.verdict import Level
from normlab.numerics.power_law import Fit
from normlab.pages.numbers import NONE, join_names, minus

FINE: tuple[Finding, ...] = ("flat", "as its size", "constant")
"""Findings on a change that need no action."""

_VERBS: dict[Finding, str] = {
    "not finite": "are not finite",
    "grows": "grow",
    "shrinks": "shrink",
    "unclear": "are unclear",
}
"""The most serious first."""

_CLAUSES: dict[Finding, str] = {
    "not finite": "are not finite at some {axis} in",
    "grows": "grow with {axis} in",
    "shrinks": "shrink with {axis} in",
    "unclear": "may depend on {axis} in",
}

_MOST = 3
"""Largest number of modules named in a sentence; the table has all."""

_OPTION: dict[AxisName, str] = {"width": "--base-dim", "depth": "--base-depth"}


def headline(check: CoordinateCheck) -> str:
    """One line on all axes."""
    clauses = [_clause(axis) for axis in check.axes]
    if clauses == [_independent(axis) for axis in check.axes] and len(clauses) > 1:
        clauses = ["depend neither on width nor on depth"]
    words = f"Changes in training {' and '.join(clauses)}"
    return f"The transfer rules do not hold: {words[0].lower()}{words[1:]}" if check.failed else words


def level(check: CoordinateCheck) -> Level:
    """fail: a derived rule is contradicted. warn: growth, or doubt, without a derived rule."""
    if check.failed:
        return "fail"
    fine = all(trend.change in FINE for axis in check.axes for trend in axis.trends)
    return "ok" if fine else "warn"


def sentences(check: CoordinateCheck) -> list[str]:
    """One paragraph for each axis: sizes, rule, modules that grow, shrink or are flat."""
    return [line for axis in check.axes for line in (_found(axis, check), *_advice(axis, check))]


def sizes_of(axis: Axis) -> str:
    """'width 64, 128, 256 at 4 blocks'."""
    sizes = ", ".join(map(str, axis.sizes))
    if axis.name == "width":
        return f"width {sizes} at {axis.fixed} blocks"
    return f"{sizes} blocks" + (f" of width {axis.fixed}" if axis.fixed else "")


def rule_words(axis: Axis, check: CoordinateCheck) -> str:
    """The transfer rule of the models, in words."""
    base = check.base_dim if axis.name == "width" else check.base_depth
    if axis.rule == "none":
        return "without a transfer rule"
    return f"with the {'rule' if axis.rule == 'derived' else 'hypothesis'} of {_OPTION[axis.name]} {base}"


def labels(modules: Iterable[str]) -> dict[str, str]:
    """Short names of modules: without the path of the blocks where there is one stack, and the last state in words."""
    modules = list(modules)
    stacks = {module.removesuffix(f" {LAST}") for module in modules if module.endswith(LAST)}
    prefix = f"{next(iter(stacks))}." if len(stacks) == 1 else ""
    return {module: _label(module, prefix) for module in modules}


def exponent(fit: Fit | None) -> str:
    """'+0.52 ± 0.03': the exponent, and half the width of its interval over seeds."""
    if fit is None:
        return NONE
    half = "" if fit.low is None or fit.high is None else f" ± {(fit.high - fit.low) / 2:.2f}"
    # Not −0.00: rounded first, and zero has no sign.
    return minus(f"{round(fit.exponent, 2) + 0.0:+.2f}{half}")


def finding(trend: Trend) -> str:
    """The finding on the change, and on the initial value if that grows."""
    return f"{trend.change}; size {trend.size}" if trend.size in ("grows", "not finite") else trend.change


def _label(module: str, prefix: str) -> str:
    if module.endswith(LAST):
        stack = module.removesuffix(f" {LAST}")
        return "state after the last block" if prefix else f"state after the last of {stack}"
    return module.removeprefix(prefix)


def _clause(axis: Axis) -> str:
    counts = Counter(trend.change for trend in axis.trends)
    found: Finding | None = next((kind for kind in _CLAUSES if counts[kind]), None)
    if found is None:
        words = _independent(axis)
        grown = sum(trend.size == "grows" for trend in axis.trends)
        return f"{words}, though {grown} of {len(axis.trends)} modules start larger" if grown else words
    return f"{_CLAUSES[found].format(axis=axis.name)} {counts[found]} of {len(axis.trends)} modules"


def _independent(axis: Axis) -> str:
    return f"do not depend on {axis.name}"


def _found(axis: Axis, check: CoordinateCheck) -> str:
    names = labels(trend.module for trend in axis.trends)
    parts = []
    for kind, verb in _VERBS.items():
        found = [trend for trend in axis.trends if trend.change == kind]
        if found:
            parts.append(f"changes {verb} in {_named(found, names, lambda trend: trend.steepest)}")
    scaled = [trend for trend in axis.trends if trend.change == "as its size"]
    if scaled:
        shown = _named(scaled, names, lambda trend: trend.steepest)
        parts.append(f"changes shrink, but no faster than the output itself, in {shown}")
    flat = [trend for trend in axis.trends if trend.change in ("flat", "constant")]
    if flat:
        parts.append(f"changes are flat within ±{check.threshold:g} in {_counted(flat, axis)}")
    larger = [trend for trend in axis.trends if trend.size == "grows"]
    if larger:
        parts.append(f"sizes at the start grow in {_named(larger, names, lambda trend: trend.start)}")
    return f"Over {sizes_of(axis)}, {rule_words(axis, check)}: {'; '.join(parts)}."


def _named(trends: Sequence[Trend], names: dict[str, str], read: Callable[[Trend], Fit | None]) -> str:
    """The modules with the largest exponents, and how many more there are."""
    worst = sorted(trends, key=lambda trend: -abs(fit.exponent) if (fit := read(trend)) else 0.0)
    shown = [f"{names[trend.module]} ({exponent(read(trend))})" for trend in worst[:_MOST]]
    more = len(worst) - len(shown)
    return join_names([*shown, f"{more} more"] if more else shown)


def _counted(fine: Sequence[Trend], axis: Axis) -> str:
    among = len(axis.trends)
    return f"all {among} modules" if len(fine) == among else f"{len(fine)} of {among} modules"


def _advice(axis: Axis, check: CoordinateCheck) -> list[str]:
    """Advice: what to do about growth without a rule, and how to read a hypothesis."""
    if axis.rule == "hypothesis":
        return [f"The depth rule of {check.target.scheme} is a hypothesis: nothing is claimed, so nothing can fail."]
    if axis.rule == "none" and any(trend.change in ("grows", "not finite") for trend in axis.trends):
        advice = f"A learning rate that was tuned at one {axis.name} is then too large at a greater one"
        own = check.target.kind in ("scheme", "run")
        return [f"{advice}; {_OPTION[axis.name]} applies the rules of transfer." if own else f"{advice}."]
    return []
