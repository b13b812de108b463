"""Data of the plots on a check's page: means and spreads over seeds, rounded to keep the page small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from normlab.checks.judge import growth_laws
from normlab.checks.judge.verdict import mean
from normlab.checks.ladder_records import Ladder, StepRung
from normlab.checks.result import Check
from normlab.checks.theory.records import TheoryLook
from normlab.checks.view.panels import PANELS, ProfilePanel, measured
from normlab.checks.view.summary import depth_of
from normlab.probes.profile import Number, Profile, When
from normlab.utils.records import to_plain

BEYOND = 2.0
"""A fitted law is drawn up to so many times the largest depth."""


def plot_data(checks: Sequence[Check]) -> dict[str, Any]:
    """Plot data as JSON for the page's script; one colour for each check."""
    panels = measured([profile for check in checks for profile in check.ladder.profiles])
    limits = checks[0].thresholds
    return {
        "schemes": [{"label": check.target.name} for check in checks],
        "panels": [_panel(panel, checks[0]) for panel in panels],
        "gradient": [limits.gradient_low, limits.gradient_high],
        "checks": [_check(check, k, [p.name for p in panels]) for k, check in enumerate(checks)],
    }


def _panel(panel: ProfilePanel, check: Check) -> dict[str, Any]:
    shown = {"name": panel.name, "title": panel.title, "log": panel.log, "span": panel.span}
    return shown | {"limits": panel.lines(check.thresholds), "boundary": panel.at_boundaries}


def _check(check: Check, place: int, names: Sequence[str]) -> dict[str, Any]:
    return {
        "scheme": place,
        "depths": list(check.ladder.depths),
        "depth": check.depth,
        "unigram": check.target.unigram,
        "profiles": [
            _profile(check.ladder.at(depth, when), names)
            for depth in check.ladder.depths
            for when in check.ladder.snapshots
            if check.ladder.at(depth, when)
        ],
        "guilty": _guilty(check),
        "theory": _theory(check),
        "ladder": {when: _rungs(check.ladder, when) for when in check.ladder.snapshots},
        "fits": {when: _fits(check, when) for when in check.ladder.snapshots},
        "widths": _widths(check),
        "steps": [_step(rung) for rung in check.steps or ()],
        "rates": None if check.rates is None else to_plain(check.rates),
        "curves": [{"depth": int(depth), "loss": rounded(loss)} for depth, loss in check.curves.items()],
    }


def _profile(profiles: Sequence[Profile], names: Sequence[str]) -> dict[str, Any]:
    """Means over seeds, place by place, and the lowest and highest seed where there are several."""
    first = profiles[0]
    series = {panel.name: [panel.read(profile) for profile in profiles] for panel in PANELS if panel.name in names}
    return {
        "depth": first.depth,
        "when": first.when,
        "step": first.step,
        "mean": {name: rounded([mean(place) for place in zip(*rows, strict=True)]) for name, rows in series.items()},
        "spread": {name: _spread(rows) for name, rows in series.items()} if len(profiles) > 1 else {},
    }


def _spread(rows: Sequence[Sequence[Number]]) -> list[list[Number]]:
    known = [[x for x in place if x is not None] for place in zip(*rows, strict=True)]
    return [rounded([min(place, default=None) for place in known]), rounded([max(p, default=None) for p in known])]


def _guilty(check: Check) -> dict[str, dict[str, Any]]:
    """(blocks, depth) to mark in each panel: those of its own verdict, else of the worst one.

    A verdict that names all blocks, or none, marks none in its own panels.
    """
    named = {v.name: v for v in check.trouble if 0 < len(v.layers) < depth_of(v, check)}
    # In the stack that is shown first, if it has any.
    gravest = next((v for v in named.values() if depth_of(v, check) == check.depth), next(iter(named.values()), None))
    told = {verdict.name for verdict in check.trouble}
    found = {p.name: named.get(p.verdict) if p.verdict in told else gravest for p in PANELS}
    return {
        name: {"depth": depth_of(verdict, check), "blocks": list(verdict.layers)}
        for name, verdict in found.items()
        if verdict is not None
    }


def _theory(check: Check) -> dict[str, Any] | None:
    theory = check.theory
    if theory is None:
        return None
    return {
        "depth": theory.depth,
        "predicted": rounded(theory.predicted),
        "before": _look(theory.before),
        "after": _look(theory.after),
        "scale": [
            {"block": row.block, "branch": row.branch, "factors": list(row.factors), "gains": rounded(row.gains)}
            for row in theory.scale_test
        ],
    }


def _look(look: TheoryLook | None) -> dict[str, Any] | None:
    if look is None:
        return None
    slopes = [{"branch": slope.branch, "values": rounded(slope.values)} for slope in look.slopes]
    return {"certificate": rounded(look.certificate), "slopes": slopes}


def _rungs(ladder: Ladder, when: When) -> dict[str, list[list[Number]]]:
    """[depth, mean, lowest, highest] of each number that has a law over depth."""
    rungs: dict[str, Callable[[Profile], Number]] = {
        "rms": lambda profile: profile.rms[-1],
        "G": lambda profile: profile.G,
    }
    return {name: [_rung(ladder.at(depth, when), depth, read) for depth in ladder.depths if ladder.at(depth, when)]
            for name, read in rungs.items()}  # fmt: skip


def _rung(profiles: Sequence[Profile], depth: int, read: Callable[[Profile], Number]) -> list[Number]:
    values = [x for profile in profiles if (x := read(profile))]
    if not values:
        return [depth, None, None, None]
    # Sizes that differ by orders of magnitude between seeds have no other mean than the geometric one.
    return [depth, *rounded([math.exp(float(np.mean(np.log(values)))), min(values), max(values)])]


def _fits(check: Check, when: When) -> dict[str, Any]:
    """The laws over depth as two points of a line: from where they were fitted to somewhat beyond."""
    forward = growth_laws.forward_law(check.ladder, when, check.thresholds)
    backward = growth_laws.backward_law(check.ladder, when, thresholds=check.thresholds).fit
    far = BEYOND * check.ladder.depths[-1]
    return {
        "rms": _line(forward.p, forward.depths[0], far) if forward.p else None,
        "G": _line(backward, fitted_from(check, when), far) if backward else None,
    }


def fitted_from(check: Check, when: When) -> int:
    """The smallest depth that the law of the gradient rests on: shallow stacks count only where there is no other."""
    depths = [depth for depth in check.ladder.depths if check.ladder.at(depth, when)]
    deep = [depth for depth in depths if depth >= check.thresholds.least_depth]
    return deep[0] if len(deep) > 1 else depths[0]


def _line(fit: growth_laws.Fit, low: float, high: float) -> dict[str, Any]:
    return {"x": [low, high], "y": rounded([fit.at(low), fit.at(high)]), "p": round(fit.exponent, 3)}


def _widths(check: Check) -> list[dict[str, Any]]:
    """RMS of the last state and G at each width, deepest stack."""
    found = []
    for rung in check.widths or ():
        for when in rung.ladder.snapshots:
            profiles = rung.ladder.deepest(when)
            size = mean([profile.rms[-1] for profile in profiles])
            gain = growth_laws.gradient_gain(profiles)
            found.append({"width": rung.width, "when": when, "rms": one(size), "G": one(gain)})
    return found


def _step(rung: StepRung) -> dict[str, Any]:
    looks = {when: {name: one(getattr(look, name)) for name in ("rms", "G", "loss")}
             for when, look in (("before", rung.before), ("after", rung.after))}  # fmt: skip
    return {"step": rung.step, **looks}


def rounded(values: Sequence[Number]) -> list[Number]:
    """Round to five significant digits, more than a screen shows."""
    return [one(value) for value in values]


def one(value: Number) -> Number:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
