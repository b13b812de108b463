"""`normlab doctor` on extras, and shell completion."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from normlab.cli import extras
from tests.command import normlab

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OWN_WORK = {"docs", "lint", "notebook", "test"}
"""Extras for work on NormLab itself."""


def test_every_extra_is_described():
    assert set(extras.ENABLES) == set(PROJECT["optional-dependencies"]) - OWN_WORK


def test_every_extra_that_is_named_exists():
    texts = [
        *(ROOT / "normlab").rglob("*.py"),
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(path for path in (ROOT / "examples").glob("*") if path.is_file()),
    ]
    for path in texts:
        for names in re.findall(r"normlab\[([a-z,]+)\]", path.read_text("utf-8")):
            assert set(names.split(",")) <= set(PROJECT["optional-dependencies"]), f"{path}: {names}"


def test_what_is_missing_is_named_with_the_line_that_gets_it(monkeypatch):
    wanted = [
        "torch>=2",
        "nothing-like-it>=1; extra == 'hf'",
        'torch[x]>=2; python_version > "3" and extra == "hf"',
        "torch; extra == 'bpe'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    found = {extra.name: extra for extra in extras.extras()}
    assert set(found) == {"bpe", "hf"}
    assert found["bpe"].installed
    assert found["bpe"].line.startswith("installed: BPE")
    assert found["hf"].missing == ("nothing-like-it",)
    assert found["hf"].line.endswith('pip install "normlab[hf]"')


def test_from_a_folder_that_was_not_installed_nothing_is_said(monkeypatch):
    def missing(_name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert extras.extras() == []


def test_doctor_shows_them():
    shown = normlab("doctor").stdout
    assert "extras hf" in shown
    assert "extras cluster" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell):
    found = normlab("completion", shell)
    assert found.returncode == 0
    assert "normlab" in found.stdout
    assert "simulate" in found.stdout


def test_an_unknown_shell_is_refused():
    found = normlab("completion", "tcsh")
    assert found.returncode == 2
    assert "'bash', 'zsh', 'fish'" in found.stdout + found.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_verbs_and_options(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(normlab("completion", "bash").stdout)
    assert completed(script, "normlab", "sim") == ["simulate"]
    assert "--scheme" in completed(script, "normlab", "simulate", "--sch")


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f'"{word}"' for word in words)
    state = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    ask = f'source {script}; {state}; _tyro_normlab; printf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return found.stdout.split()
