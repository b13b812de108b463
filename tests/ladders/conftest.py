"""The text that ladders of the tests are trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare.small import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("ladder") / "text")
