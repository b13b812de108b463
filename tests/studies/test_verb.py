"""`normlab study` as a person meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from normlab.cli import main
from tests.studies.rows import write_study


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["normlab", "study", *arguments])
    try:
        main.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_help_has_examples_and_needs_no_torch():
    code = (
        "import sys; sys.argv = ['normlab', 'study', '--help']\n"
        "from normlab.cli import main\n"
        "try: main.main()\n"
        "except SystemExit as stop: assert stop.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "normlab study high-rates --dry-run" in found.stdout


def test_the_list_needs_no_torch(tmp_path):
    write_study(tmp_path / "studies")
    code = (
        "import sys; sys.argv = ['normlab', 'study']\n"
        "from normlab.cli import main\n"
        "main.main()\n"
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "2 not run" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tyni",), "did you mean 'tiny'"),
        (("nowhere.toml",), "there is no file nowhere.toml"),
        (("tiny", "--minutes", "-1"), "minutes must be positive"),
        (("tiny", "--studies", "elsewhere"), "no folder elsewhere"),
        (("--results", "studies/tiny.toml"), "studies/tiny.toml is a file; --results is"),
        (("--report", "--results", "studies/tiny.toml"), "studies/tiny.toml is a file; --results is"),
        (("tiny", "--report", "--results", "studies/tiny.toml"), "studies/tiny.toml is a file; --results is"),
    ],
)
def test_mistakes_are_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "studies")
    assert call(monkeypatch, *arguments) == 2
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    assert words in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["studies"]


def test_a_report_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "studies")
    assert call(monkeypatch, "--report", "--docs", "claims.md", "--html", "page.html") == 0
    assert "2 claims: 2 not run." in (tmp_path / "claims.md").read_text()
    assert (tmp_path / "page.html").stat().st_size < 100_000
