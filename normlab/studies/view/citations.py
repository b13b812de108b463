"""Citations: the claims that the card of a scheme cites, on its page in docs/ and in the file that the package holds.

Claims of studies that have not ended are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from normlab.schemes.catalog.cited_claims import ROLES, CitedClaim, Role
from normlab.studies.rules.base import Rule
from normlab.studies.study import Study
from normlab.studies.view.claim_lines import MARKS, ClaimLine, cell_text
from normlab.studies.view.through_experiments import judged_through

MOST_NUMBERS = 3
"""Arms whose numbers a scheme's page has; of a claim on more it says where they are."""


def cited(found: Sequence[ClaimLine]) -> list[CitedClaim]:
    """Every claim that has a verdict, as the package holds it."""
    return [
        CitedClaim(study=line.study.name, mark=MARKS[line.finding.verdict], verdict=line.verdict,
                   claim=line.claim.claim, schemes=roles(line.study, line.claim.rule))
        for line in found if line.finding.is_verdict
    ]  # fmt: skip


def roles(study: Study, rule: Rule) -> dict[str, Role]:
    """The schemes that a rule names or judges through an experiment, without options and arms.

    What is compared with itself is a subject.
    """
    found: dict[str, Role] = {scheme: "subject" if scheme in rule.subjects else "compared" for scheme in rule.schemes}
    found |= judged_through(study, rule)
    subjects = {_name(scheme) for scheme, role in found.items() if role == "subject"}
    return {name: "subject" if name in subjects else "compared" for name in map(_name, found)}


def page_lines(found: Sequence[ClaimLine], scheme: str, claims: str = "../claims.md") -> dict[Role, list[str]]:
    """Lines of a scheme's page, in Markdown, by its role in the claims."""
    lines: dict[Role, list[str]] = {role: [] for role in ROLES}
    for line in found:
        role = roles(line.study, line.claim.rule).get(scheme)
        if role is not None and line.finding.is_verdict:
            place = f"[{line.study.name}]({claims}#{line.study.name})"
            lines[role].append(f"{MARKS[line.finding.verdict]} {line.verdict}: {_sentence(line)} ({place})")
    return lines


def _sentence(line: ClaimLine) -> str:
    # A page of claims has the numbers of all arms; more than a few say nothing in a list.
    few = len(line.finding.parts) <= MOST_NUMBERS
    ours = f" Ours: {cell_text(line.finding.ours)}." if line.finding.ours and few else ""
    theirs = "No paper says so." if line.claim.own_question else f"Theirs: {cell_text(line.claim.theirs)}."
    return f"{cell_text(line.claim.claim)} {theirs}{ours}"


def _name(scheme: str) -> str:
    """Name of a scheme without options and arm: "peri" of "peri(step=0.1)@no-decay"."""
    return scheme.partition("@")[0].partition("(")[0]
