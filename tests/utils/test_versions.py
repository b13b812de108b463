"""What computed a result, down to the commit where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from normlab.utils.versions import commit_of, is_unnamed_copy, versions

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="makes a repository: needs git")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "one")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_packages_that_computed_it_are_known() -> None:
    assert {"normlab", "torch", "python"} <= versions().keys()


@needs_git
def test_the_commit_of_this_checkout_is_found() -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout: there is no commit to find")
    assert versions()["commit"].removesuffix("-dirty") == git(root, "rev-parse", "HEAD")[:12]


@needs_git
def test_a_checkout_has_a_commit(checkout: Path) -> None:
    assert commit_of(checkout) == git(checkout, "rev-parse", "HEAD")[:12]


@needs_git
def test_changes_that_are_not_committed_are_told(checkout: Path) -> None:
    (checkout / "code.py").write_text("2")
    assert str(commit_of(checkout)).endswith("-dirty")


def test_a_package_that_is_installed_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None


def test_a_broken_repository_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) is None


@needs_git
def test_without_git_there_is_no_telling(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout) is None


def test_a_copy_says_its_commit_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMLAB_COMMIT", "0123456789ab")
    assert commit_of(tmp_path) == "0123456789ab"


def test_a_copy_of_a_checkout_has_no_name_and_what_is_installed_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normlab.utils.versions._CHECKOUT", tmp_path)
    assert not is_unnamed_copy()
    (tmp_path / "pyproject.toml").touch()
    assert is_unnamed_copy()
    commit_of.cache_clear()
    monkeypatch.setenv("NORMLAB_COMMIT", "0123456789ab")
    assert not is_unnamed_copy()
