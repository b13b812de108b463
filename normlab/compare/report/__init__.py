"""Reports: results in, one self-contained HTML page or a Markdown table out."""

from normlab.compare.report.markdown import markdown
from normlab.compare.report.page import build

__all__ = ["build", "markdown"]
