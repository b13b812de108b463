"""The command line in the test's own process: no interpreter to start, no torch to import again."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from normlab.cli import main


def normlab(*arguments: str, columns: int = 160) -> subprocess.CompletedProcess[str]:
    """What `normlab ARGUMENTS` does, with its exit code and what it prints to a terminal of that width."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["normlab", *arguments])
        patch.setenv("COLUMNS", str(columns))
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
    return subprocess.CompletedProcess(arguments, int(code), out.getvalue(), err.getvalue())
