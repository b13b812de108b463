"""Reports: results in, one self-contained HTML page or a Markdown table out."""

from normlab.report.compose import build
from normlab.report.markdown import markdown

__all__ = ["build", "markdown"]
