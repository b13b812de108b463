"""Report of all studies (docs/claims.md and an HTML page): every claim with its verdict, from the stored rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normlab.pages.numbers import NONE, minus
from normlab.pages.page import render, section
from normlab.studies.finding import Finding
from normlab.studies.headlines import RESULTS_TESTED
from normlab.studies.view.claim_lines import MARKS, ClaimLine, claim_lines, markdown_text
from normlab.studies.view.summary import counts_of_result, line_counts, refuted_list, results_table
from normlab.utils.text import counted

__all__ = ["claim_lines", "claims_page", "headline", "markdown"]

_TONES = {"reproduced": "ok", "refuted": "fail", "open": "warn", "unfinished": "", "not run": ""}
_HEADS = ("Claim", "Source", "Theirs", "Ours", "Seeds", "Budget", "Verdict", "Power", "To settle")
_NOTE = """_Written by `normlab study --report` from `studies/` and the rows in `benchmarks/results/studies/`; do not
edit it. `normlab study NAME --report` makes a page of every comparison, ladder or simulation of a study._

- **Reproduced**, **refuted**, **open**: what the rule in the study's file says of the rows, all of which carry its
  hash. A rule that was corrected after its runs says why, and what it said before.
- **Unfinished** (not all runs of the study have ended) and **not run** are no verdicts.
- Intervals hold together at the rule's level; bounds of shares, and tests of counts and ranks, are one-sided at that
  level. Levels hold for each claim by itself, not for all claims together."""
_TESTED = "A result has several parts, and each has a verdict of its own."
_REFUTED = "Claims of papers that the rows contradict; questions that no paper answers are not among them."


def markdown(found: Sequence[ClaimLine]) -> str:
    """Markdown: the headline results with their verdicts, what was refuted, then every study with its claims."""
    parts = ["# Claims", headline(found), _NOTE, "## Results of papers", _TESTED, results_table(found)]
    if refuted := refuted_list(found):
        parts += ["## What was refuted", _REFUTED, refuted]
    names = dict.fromkeys(line.study.name for line in found)
    parts += [_details([line for line in found if line.study.name == name]) for name in names]
    return "\n\n".join(parts) + "\n"


def headline(found: Sequence[ClaimLine]) -> str:
    """Number of claims by verdict."""
    own = [line for line in found if line.claim.own_question]
    ours = f" Among them {counted(len(own), 'question')} that no paper answers." if own else ""
    return f"{counted(len(found), 'claim')}: {line_counts(found)}.{ours}" if found else "There are no studies yet."


def claims_page(found: Sequence[ClaimLine]) -> str:
    """The same as one HTML file."""
    studies = {line.study.name: line.study for line in found}
    results = [(number, text, counts_of_result(found, number)) for number, text in RESULTS_TESTED.items()]
    sections = [section("results", "Headline results", "study/results.html", results=results)] if found else []
    sections += [
        section(
            name, study.title, "study/claims.html", study=study,
            cards=[_card(line) for line in found if line.study.name == name],
        )
        for name, study in studies.items()
    ]  # fmt: skip
    return render("Claims", sections, {}, headline=headline(found), styles=("study/claims.css",), plots=False)


def _cells(line: ClaimLine) -> tuple[str, ...]:
    found, claim = line.finding, line.claim
    verdict = f"{MARKS[found.verdict]} {line.verdict}"
    seeds = f"{found.seeds} ({counted(found.runs, 'run')})" if found.seeds else NONE
    ours, power = found.ours or NONE, found.power or (f"planned: {claim.power}" if claim.power else NONE)
    source = f"no result of a paper: {claim.source}" if claim.own_question else claim.source
    return claim.claim, source, claim.theirs, ours, seeds, line.budget, verdict, power, found.settling or NONE


def _facts(line: ClaimLine) -> list[tuple[str, str]]:
    """What is known of a claim beside its words and its verdict."""
    shown = [(n, text) for n, text in zip(_HEADS, _cells(line), strict=True) if n not in ("Claim", "Verdict")]
    return [fact for fact in shown if fact[1] != NONE]


def _details(found: Sequence[ClaimLine]) -> str:
    study = found[0].study
    minutes = f"{study.gpu_minutes:g} GPU minutes" if study.gpu_minutes else "no GPU"
    cost = f"{markdown_text(study.cost)} · {minutes}"
    about = f"{markdown_text(study.title)}. `normlab study {study.name}` · {cost} · rule `{study.rule_hash}`"
    shared = [note for note in found[0].finding.notes if all(note in line.finding.notes for line in found)]
    notes = ["\n".join(f"- {markdown_text(note)}" for note in shared)] if shared else []
    return "\n\n".join([f"## {study.name}", about, *notes, *(_claim(line, shared) for line in found)])


def _claim(line: ClaimLine, told: Sequence[str]) -> str:
    """A claim in Markdown, its verdict first; without the notes that are `told` already."""
    words = markdown_text(line.claim.claim)
    points = [f"**{MARKS[line.finding.verdict]} {line.verdict}** · {words}\n"]
    points += [f"- {name}: {markdown_text(text)}" for name, text in _facts(line)]
    points.append(f"- `{line.claim.name}` holds if {markdown_text(line.claim.rule.sentence)}")
    points += [f"    - {markdown_text(note)}" for note in line.finding.notes if note not in told]
    return "\n".join(points)


def _card(line: ClaimLine) -> dict[str, Any]:
    found = line.finding
    return {
        "name": line.claim.name, "claim": line.claim.claim, "verdict": line.verdict,
        "mark": MARKS[found.verdict], "tone": _TONES[found.verdict], "facts": _facts(line),
        "rule": line.claim.rule.sentence, "kind": line.claim.rule.kind, "notes": found.notes,
        "bars": [bar for part in (found.parts or (found,)) if (bar := _bar(part))],
    }  # fmt: skip


def _bar(found: Finding) -> dict[str, Any] | None:
    """Positions of the interval and of the claimed range, in per cent of a strip that contains both."""
    if found.low is None or found.high is None:
        return None
    ends = [found.low, found.high, *(end for end in found.claimed if end is not None)]
    # A ratio of 1e20 and a bound of 1000 cannot be told apart from 0 on a linear strip.
    is_log = min(ends) > 0.0 and max(ends) > 100.0 * min(ends)
    scale = math.log10 if is_log else float
    span = (scale(max(ends)) - scale(min(ends))) or abs(found.low) or 1.0
    first, last = scale(min(ends)) - 0.15 * span, scale(max(ends)) + 0.15 * span
    if min(ends) > 0.0 and not is_log:
        first = max(first, 0.0)

    def place(value: float | None, missing: float) -> float:
        return missing if value is None else 100.0 * (scale(value) - first) / (last - first)

    left, right = place(found.claimed[0], 0.0), place(found.claimed[1], 100.0)
    low, high = place(found.low, 0.0), place(found.high, 100.0)
    estimate = place(found.estimate, (low + high) / 2)
    shown = [minus(f"{10.0**end if is_log else end:.3g}") for end in (first, last)]
    return {"claimed": (left, max(right - left, 0.5)), "interval": (low, max(high - low, 0.8)), "estimate": estimate,
            "ends": (shown[0], f"{shown[1]}, logarithmic" if is_log else shown[1]), "ours": found.ours}  # fmt: skip
