"""Report of a ladder: HTML page, Markdown, JSON and terminal lines from its rows, answer and design."""

from normlab.ladders.report.as_json import to_json
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.design import LadderDesign
from normlab.ladders.report.markdown import markdown
from normlab.ladders.report.page import build
from normlab.ladders.report.terminal import terminal_lines

__all__ = ["LadderDesign", "LadderReport", "build", "markdown", "terminal_lines", "to_json"]
