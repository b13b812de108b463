"""Terminal output of a ladder as lines: a sentence for each scheme, cautions, headline."""

from __future__ import annotations

from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.verdict import findings, headline


def terminal_lines(content: LadderReport) -> list[str]:
    """Lines to print; the headline is last, where the eye is."""
    notes = [f"- {line}" for line in cautions(content)]
    return [*findings(content), *notes, headline(content)]
