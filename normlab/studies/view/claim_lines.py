"""Claims of all studies with their findings and budgets: what reports are made of, and how they write text."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.pages.numbers import NONE, format_count
from normlab.studies.finding import Finding
from normlab.studies.judge import judge_claims
from normlab.studies.record import StudyRecord
from normlab.studies.study import FOLDER, RESULTS, Claim, Study, find_studies, load_study
from normlab.utils.text import counted

MARKS = {"reproduced": "✓", "refuted": "✗", "open": "?", "unfinished": "…", "not run": NONE}


@dataclass(frozen=True)
class ClaimLine:
    """A claim with its finding and its cost."""

    study: Study
    claim: Claim
    finding: Finding
    budget: str

    @property
    def verdict(self) -> str:
        """The verdict in words, with a mark where the rule was written or corrected after its runs."""
        marks = {"rule corrected": self.claim.correction is not None, "rows known before": self.study.kind == "rows"}
        told = [mark for mark, holds in marks.items() if holds and self.finding.is_verdict]
        return ", ".join([self.finding.verdict, *told])


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
    devices = dict.fromkeys(str(row["device"]) for row in rows if row.get("device"))
    return ", ".join([*_sizes(rows), counted(len(rows), "row"), *devices])


def _sizes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Model sizes with their budgets; those with the same ones together, as the sizes of a ladder have them."""
    budgets: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        config = row.get("config")
        if isinstance(config, dict) and isinstance(model := config.get("model"), dict):
            # Tasks know their unit, but import torch, which the list of studies does not need.
            unit = "images" if config.get("images") else "tokens"
            budgets[f"{model.get('depth')}×{model.get('dim')}", unit].add(config.get(unit) or row.get("tokens") or 0)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (size, unit), own in budgets.items():
        alike[unit, tuple(sorted(own))].append(size)
    return [
        f"{', '.join(sizes)} for {', '.join(map(format_count, own))} {unit}" for (unit, own), sizes in alike.items()
    ]


def markdown_text(words: str) -> str:
    """Escape user text for Markdown: no tags, no accidental emphasis."""
    return html.escape(" ".join(words.split()), quote=False).replace("*", "\\*").replace("_", "\\_")


def cell_text(words: str) -> str:
    """The same for a cell of a Markdown table."""
    return markdown_text(words).replace("|", "\\|")
