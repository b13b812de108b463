"""Report of all studies (docs/claims.md and an HTML page): every claim with its verdict, from the stored rows."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.pages.numbers import NONE, count
from normlab.pages.page import render, section
from normlab.studies.finding import Finding
from normlab.studies.judge import judge_claims
from normlab.studies.record import StudyRecord
from normlab.studies.study import FOLDER, RESULTS, Claim, Study, find_studies, load_study
from normlab.utils.text import counted

MARKS = {"reproduced": "✓", "refuted": "✗", "open": "?", "not run": NONE}
_TONES = {"reproduced": "ok", "refuted": "fail", "open": "warn", "not run": ""}
_NOTE = """_Written by `normlab study --report` from `studies/` and the rows in `benchmarks/results/studies/`; do not
edit it. A verdict is that of the rule in the study's file, whose hash every row carries. Intervals hold
together at the rule's level. **Open** names what leaves a claim undecided; **not run** is no verdict._"""


@dataclass(frozen=True)
class ClaimLine:
    """A claim with its finding and its cost."""

    study: Study
    claim: Claim
    finding: Finding
    budget: str


def claim_lines(folder: Path = FOLDER, results: Path = RESULTS) -> list[ClaimLine]:
    """All claims of all studies, by study."""
    found = []
    for study in (load_study(name, folder) for name in find_studies(folder)):
        findings, budget = judge_claims(study, results), budget_of(study, results)
        found += [ClaimLine(study, claim, findings[claim.name], budget) for claim in study.claims]
    return found


def budget_of(study: Study, results: Path = RESULTS) -> str:
    """Model sizes, tokens and number of runs, from the rows."""
    try:
        rows = [row for own in StudyRecord(study, results / study.name).rows().values() for row in own]
    except NormLabError:  # the finding reports what is wrong with the rows
        return NONE
    if not rows:
        return NONE
    sizes = dict.fromkeys(size for row in rows if (size := _size(row)))
    devices = dict.fromkeys(str(row["device"]) for row in rows if row.get("device"))
    return ", ".join([*sizes, counted(len(rows), "row"), *devices])


def _size(row: Mapping[str, Any]) -> str:
    config = row.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        return ""
    model, tokens = config["model"], row.get("tokens")
    return f"{model.get('depth')}×{model.get('dim')} for {count(config.get('tokens') or tokens)} tokens"


def markdown(found: Sequence[ClaimLine]) -> str:
    """Markdown: the table of all claims, then the details of each."""
    heads = ("Claim", "Source", "Theirs", "Ours", "Seeds", "Budget", "Verdict", "Power")
    table = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    table += ["| " + " | ".join(map(_cell, _cells(line))) + " |" for line in found]
    parts = ["# Claims", headline(found), _NOTE, "\n".join(table)]
    names = dict.fromkeys(line.study.name for line in found)
    parts += [_details([line for line in found if line.study.name == name]) for name in names]
    return "\n\n".join(parts) + "\n"


def headline(found: Sequence[ClaimLine]) -> str:
    """Number of claims by verdict."""
    counts = Counter(line.finding.verdict for line in found)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict])
    return f"{counted(len(found), 'claim')}: {verdicts}." if found else "There are no studies yet."


def claims_page(found: Sequence[ClaimLine]) -> str:
    """The same as one HTML file."""
    studies = {line.study.name: line.study for line in found}
    sections = [
        section(
            name, study.title, "study/claims.html", study=study,
            cards=[_card(line) for line in found if line.study.name == name],
        )
        for name, study in studies.items()
    ]  # fmt: skip
    return render("Claims", sections, {}, headline=headline(found), styles=("study/claims.css",), plots=False)


def _cells(line: ClaimLine) -> tuple[str, ...]:
    found, claim = line.finding, line.claim
    verdict = f"{MARKS[found.verdict]} {found.verdict}"
    seeds = f"{found.seeds} ({counted(found.runs, 'run')})" if found.seeds else NONE
    ours, power = found.ours or NONE, found.power or NONE
    return claim.claim, claim.source, claim.theirs, ours, seeds, line.budget, verdict, power


def _details(found: Sequence[ClaimLine]) -> str:
    study = found[0].study
    about = f"`normlab study {study.name}` · {study.cost} · rule `{study.rule_hash}`"
    points = []
    for line in found:
        points.append(f"- `{line.claim.name}`, {line.claim.rule.kind}: {_text(line.claim.rule.words)}")
        points += [f"  - {_text(note)}" for note in line.finding.notes]
    return "\n".join([f"## {_text(study.title)}\n", about, "", *points])


def _card(line: ClaimLine) -> dict[str, Any]:
    found = line.finding
    names = ("Claim", "Source", "Theirs", "Ours", "Seeds", "Budget", "Verdict", "Power")
    shown = [(n, text) for n, text in zip(names, _cells(line), strict=True) if n not in ("Claim", "Verdict")]
    facts = [fact for fact in shown if fact[1] != NONE]
    return {
        "name": line.claim.name, "claim": line.claim.claim, "verdict": found.verdict, "mark": MARKS[found.verdict],
        "tone": _TONES[found.verdict], "facts": facts, "rule": line.claim.rule.words,
        "kind": line.claim.rule.kind, "notes": found.notes,
        "bars": [bar for part in (found.parts or (found,)) if (bar := _bar(part))],
    }  # fmt: skip


def _bar(found: Finding) -> dict[str, Any] | None:
    """Positions of the interval and of the claimed range, in per cent of a strip that contains both."""
    if found.low is None or found.high is None:
        return None
    ends = [found.low, found.high, *(end for end in found.claimed if end is not None)]
    span = (max(ends) - min(ends)) or abs(found.low) or 1.0
    first, last = min(ends) - 0.15 * span, max(ends) + 0.15 * span

    def place(value: float | None, missing: float) -> float:
        return missing if value is None else 100.0 * (value - first) / (last - first)

    left, right = place(found.claimed[0], 0.0), place(found.claimed[1], 100.0)
    low, high = place(found.low, 0.0), place(found.high, 100.0)
    estimate = place(found.estimate, (low + high) / 2)
    return {"claimed": (left, max(right - left, 0.5)), "interval": (low, max(high - low, 0.8)), "estimate": estimate,
            "ends": (f"{first:.3g}", f"{last:.3g}"), "ours": found.ours}  # fmt: skip


def _text(words: str) -> str:
    """Escape user text for Markdown: no tags, no accidental emphasis."""
    return html.escape(" ".join(words.split()), quote=False).replace("*", "\\*").replace("_", "\\_")


def _cell(words: str) -> str:
    return _text(words).replace("|", "\\|")
