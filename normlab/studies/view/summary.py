"""Verdicts by headline result, for docs/claims.md and the README; made from rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from normlab.studies.finding import Finding
from normlab.studies.headlines import RESULTS_TESTED
from normlab.studies.view.claim_lines import MARKS, ClaimLine, cell_text, markdown_text


def of_result(found: Sequence[ClaimLine], number: int) -> list[ClaimLine]:
    """The claims that are parts of a headline result."""
    return [line for line in found if line.claim.number == number]


def counts_of_result(found: Sequence[ClaimLine], number: int) -> str:
    """How many parts of a headline result have each verdict; questions that no paper answers are counted apart."""
    own = of_result(found, number)
    of_papers, ours = ([line for line in own if line.claim.own_question is mine] for mine in (False, True))
    asked = f"questions beyond the paper: {line_counts(ours)}" if ours else ""
    return "; ".join(filter(None, (line_counts(of_papers), asked)))


def results_table(found: Sequence[ClaimLine]) -> str:
    """Markdown table of all headline results with the verdicts on their parts, those not run included."""
    lines = ["| # | Result | Verdicts on its parts | Studies |", "|---|---|---|---|"]
    for number, result in RESULTS_TESTED.items():
        own = of_result(found, number)
        names = dict.fromkeys(line.study.name for line in own)
        studies = ", ".join(f"[{name}](#{name})" for name in names)
        lines.append(f"| {number} | {cell_text(result)} | {counts_of_result(found, number)} | {studies} |")
    return "\n".join(lines)


def found_table(found: Sequence[ClaimLine], claims: str = "docs/claims.md") -> str:
    """The README's table: results of which a part has a verdict.

    Claims of studies that have not ended are left out.
    """
    lines = ["| Result of a paper | Verdicts on its parts |", "|---|---|"]
    for number, result in RESULTS_TESTED.items():
        own = of_result(found, number)
        run = [line for line in own if line.finding.is_verdict]
        if run:
            parts = "" if len(run) == len(own) else f" (of {len(own)} parts)"
            counts = f"[{counts_of_result(run, number)}{parts}]({claims}#{run[0].study.name})"
            lines.append(f"| {cell_text(result)} | {counts} |")
    return "\n".join(lines) if len(lines) > 2 else f"No study has been run yet ([all claims]({claims}))."


def refuted_list(found: Sequence[ClaimLine]) -> str:
    """Markdown list of the claims of papers that were refuted, in the words of the claims."""
    refuted = [line for line in found if line.finding.verdict == "refuted" and not line.claim.own_question]
    lines = [(markdown_text(line.claim.claim), line.study.name) for line in refuted]
    return "\n".join(f"- {claim} ([{study}](#{study}))" for claim, study in lines)


def line_counts(found: Sequence[ClaimLine]) -> str:
    """How many claims have each verdict."""
    return verdict_counts(line.finding for line in found)


def verdict_counts(findings: Iterable[Finding]) -> str:
    """How many findings have each verdict: "2 reproduced, 1 open"."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict])
