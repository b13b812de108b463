"""What tests of whole runs share: a text, and one run on it that nothing disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from normlab.train.trainer import train
from tests.train.runs import config_of, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Iterator[Path]:
    """A file of text, and a token cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="session")
def straight(text, tmp_path_factory) -> Path:
    """The folder of a run that went from its first step to its last."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train(config_of(text), folder, progress=False).state == "done"
    return folder
