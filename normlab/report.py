"""Old names of version 0.1: `normlab.report` is now `normlab.compare.report`."""

from __future__ import annotations

from normlab.utils.lazy import moved

__getattr__ = moved(__name__, {"build": "normlab.compare.report.build", "markdown": "normlab.compare.report.markdown"})
