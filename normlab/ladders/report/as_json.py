"""JSON of a ladder: rows, answer with priors and versions, design, and the sentences of the page."""

from __future__ import annotations

from typing import Any

from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.verdict import findings, headline
from normlab.utils.records import to_plain

SCHEMA = 1


def to_json(content: LadderReport) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    return {
        "schema": SCHEMA,
        "headline": headline(content),
        "findings": findings(content),
        "cautions": cautions(content),
        "answer": content.answer.to_dict(),
        "held_out": to_plain(content.held_out),
        "sets": {name: own.to_dict() for name, own in content.sets.items()},
        "design": content.design.to_dict(),
        "rows": to_plain(list(content.rows)),
    }
