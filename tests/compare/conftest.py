"""Text, and comparisons that nothing has disturbed, for others to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from normlab.compare import compare
from tests.compare import small


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="session")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schemes, two rates, two seeds: eight short runs."""
    folder = tmp_path_factory.mktemp("whole")
    compare(small.configuration(text), folder, progress=False, command=["normlab", "compare"])
    return folder


@pytest.fixture(scope="session")
def long(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two long runs."""
    folder = tmp_path_factory.mktemp("long")
    compare(small.configuration(text, **small.long()), folder, progress=False)
    return folder
