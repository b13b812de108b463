"""Report of a comparison or run: a self-contained HTML page, or a Markdown table."""

from normlab.compare.report.markdown import markdown
from normlab.compare.report.page import build

__all__ = ["build", "markdown"]
