"""What git ignores is left out of the wheel: none of the package's own files may be."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.documentation.commands import ROOT


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a checkout, or no git here")
def test_no_file_of_the_package_is_ignored():
    files = [str(path) for path in (ROOT / "normlab").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    found = subprocess.run(command, input="\n".join(files), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
