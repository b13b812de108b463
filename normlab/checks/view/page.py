"""The HTML page of a check, or of two side by side: headline, verdicts, profiles with their bounds, ladders."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from normlab.checks.judge.blame import blocks
from normlab.checks.judge.verdict import Verdict
from normlab.checks.result import Check
from normlab.checks.view import tables, theory_tables
from normlab.checks.view.panels import measured
from normlab.checks.view.plots import plot_data
from normlab.checks.view.side_by_side import Against
from normlab.checks.view.summary import caveats, depth_of, headline, is_open, mark, meanings, open_words, reason
from normlab.pages.numbers import duration, format_count, join_names
from normlab.pages.page import Section, install_command, render, section


def page(check: Check) -> str:
    """The page of one check, as text."""
    return compose(
        [check],
        title=f"Check of {check.target.name}",
        headline=f"{headline(check)}.",
        tone=check.level,
        findings=meanings(check),
        cautions=caveats(check),
    )


def page_of_two(pair: Against) -> str:
    """The page of two checks side by side, as text."""
    names = [check.target.name for check in pair.checks]
    return compose(
        pair.checks,
        title=f"{names[0]} against {names[1]}",
        headline=f"{pair.headline}.",
        findings=[f"{check.target.name}: {line}" for check in pair.checks for line in meanings(check)],
        cautions=[f"{check.target.name}: {line}" for check in pair.checks for line in caveats(check)],
        first=[section("differences", "Side by side", "table.html", table=tables.difference_table(pair))],
    )


def compose(checks: Sequence[Check], *, title: str, first: Sequence[Section] = (), **words: Any) -> str:
    """The page of one check or more; `words` stand at its top, then the sections `first`."""
    data = plot_data(checks)
    return render(
        title,
        [*first, *_sections(checks, data)],
        data,
        facts=_facts(checks),
        styles=("check/check.css",),
        scripts=("check/check.js",),
        **words,
    )


class Reproducible(Protocol):
    """Protocol of a result that records its command and versions."""

    @property
    def command(self) -> Sequence[str]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...


def commands(checks: Sequence[Reproducible]) -> list[str]:
    """Commands that reproduce the result."""
    lines = dict.fromkeys(shlex.join(check.command) for check in checks if check.command)
    return [*install_command(checks[0].versions), *lines] if lines else []


def _facts(checks: Sequence[Check]) -> list[tuple[str, str]]:
    """Facts under the title: what was checked, and how."""
    first = checks[0]
    steps = max(profile.step for profile in first.ladder.profiles)
    facts = [("blocks", ", ".join(map(str, first.ladder.depths))), ("training", f"{steps} steps")]
    facts += [("seeds", str(len({profile.seed for profile in first.ladder.profiles})))]
    if len(checks) == 1:
        facts = [("kind", first.target.kind), ("own depth", str(first.target.depth)), *facts]
        facts += [("width", str(first.target.width))] if first.target.width else []
        facts += [("parameters", format_count(first.target.parameters))] if first.target.parameters else []
    return [*facts, ("time", duration(sum(check.seconds for check in checks)))]


def _sections(checks: Sequence[Check], data: dict[str, Any]) -> list[Section]:
    return [
        section("verdicts", "Verdicts", "check/verdicts.html", checks=[_cards(check) for check in checks]),
        *_start(checks),
        _profiles(checks, data),
        _ladders(checks, data),
        *_rates(checks),
        *_theory(checks, data),
        *_procedure(checks),
        section("configuration", "Configuration", "configuration.html",
                config=tables.config_table(checks), environment=tables.environment_table(checks)),
        section("reproduce", "How to reproduce", "reproduce.html", commands=commands(checks)),
    ]  # fmt: skip


def _cards(check: Check) -> dict[str, Any]:
    """The verdicts of one check as its cards show them."""
    shown = [verdict for verdict in check.verdicts if not is_open(verdict)]
    return {
        "name": check.target.name,
        "trouble": [_card(verdict, check) for verdict in check.trouble],
        "fine": [_card(verdict, check) for verdict in shown if verdict.level == "ok"],
        "open": join_names([open_words(verdict) for verdict in check.verdicts if is_open(verdict)] or ["nothing"]),
        "any_open": any(is_open(verdict) for verdict in check.verdicts),
        "remedies": check.remedies,
    }


def _card(verdict: Verdict, check: Check) -> dict[str, Any]:
    guilty, depth = set(verdict.layers), depth_of(verdict, check)
    return {
        "level": verdict.level,
        "mark": mark(verdict),
        "name": verdict.name,
        "finding": verdict.finding,
        "reason": reason(verdict),
        "module": verdict.module,
        "blocks": blocks(verdict.layers, depth),
        "strip": [place in guilty for place in range(depth)] if guilty else [],
    }


def _start(checks: Sequence[Check]) -> list[Section]:
    """Section on initial losses, for designs with a vocabulary."""
    if not any(check.starts for check in checks):
        return []
    return [section("start", "Before the first step", "table.html", table=tables.start_table(checks))]


def _profiles(checks: Sequence[Check], data: dict[str, Any]) -> Section:
    profiles = [profile for check in checks for profile in check.ladder.profiles]
    panels = measured(profiles)
    return section(
        "profiles", "Through the depth", "check/profiles.html",
        main=[panel for panel in panels if panel.main], more=[panel for panel in panels if not panel.main],
        depths=sorted({profile.depth for profile in profiles}), depth=max(check.depth for check in checks),
        several=len(checks) > 1,
        both=len({profile.when for profile in profiles}) > 1,
        bounded=any(_has_bound(entry["theory"]) for entry in data["checks"]),
        predicted=any(entry["theory"] and entry["theory"]["predicted"] for entry in data["checks"]),
        guilty=any(entry["guilty"] for entry in data["checks"]),
    )  # fmt: skip


def _has_bound(theory: dict[str, Any] | None) -> bool:
    looks = [theory[when] for when in ("before", "after") if theory[when]] if theory else []
    return any(x is not None for look in looks for x in look["certificate"])


def _ladders(checks: Sequence[Check], data: dict[str, Any]) -> Section:
    return section(
        "ladders", "Over depths", "check/ladders.html",
        many=max(len(check.ladder.depths) for check in checks) > 1,
        laws=tables.law_table(checks), rungs=tables.ladder_table(checks),
        widths=tables.width_table(checks), steps=tables.step_table(checks),
        curves=any(entry["curves"] for entry in data["checks"]),
    )  # fmt: skip


def _rates(checks: Sequence[Check]) -> list[Section]:
    if not any(check.rates for check in checks):
        return []
    return [section("rates", "Learning rate", "check/rates.html", table=tables.rate_table(checks))]


def _theory(checks: Sequence[Check], data: dict[str, Any]) -> list[Section]:
    known = [check.theory for check in checks if check.theory]
    if not known:
        return []
    slopes = any(look.slopes for theory in known for look in theory.looks)
    notes = list(dict.fromkeys(note for theory in known for note in theory.notes))
    return [
        section(
            "theory", "Theory", "check/theory.html", table=theory_tables.theory_table(checks),
            scale=theory_tables.scale_table(checks), jacobians=theory_tables.jacobian_table(checks), slopes=slopes,
            notes=notes,
        )
    ]  # fmt: skip


def _procedure(checks: Sequence[Check]) -> list[Section]:
    found = [(check.target.name, check.procedure) for check in checks if check.procedure]
    return [section("procedure", "Procedure", "check/procedure.html", found=found)] if found else []
