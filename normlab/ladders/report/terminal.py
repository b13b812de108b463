"""Terminal output of a ladder as lines: gaps at the top, a sentence for each scheme, cautions, headline."""

from __future__ import annotations

from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.verdict import findings, headline


def terminal_lines(content: LadderReport) -> list[str]:
    """Lines to print; the headline is last, where the eye is."""
    reasons = [
        f"  not identified beyond the ladder, {own.scheme}: {obstacle.text}"
        for own in content.answer.schemes
        for obstacle in own.identified.reasons
    ]
    notes = [f"- {line}" for line in cautions(content)]
    return [*findings(content), *reasons, *notes, headline(content)]
