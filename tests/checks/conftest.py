"""Checks in tests measure the start of schemes at the smallest preset, unless they name another: 125m takes seconds."""

from __future__ import annotations

import pytest

from normlab.checks.config import CheckConfig


@pytest.fixture(autouse=True)
def small_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CheckConfig.__init__.__kwdefaults__, "start_size", "tiny")
