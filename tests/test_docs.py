"""Documentation that cannot rot: generated pages are current, every module imports. Links: tests/documentation."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import normlab

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_scheme_has_its_page_and_its_line_in_the_readme(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    for page, text in build["scheme_pages"](build["claims"]()).items():
        assert page.read_text("utf-8") == text, f"{page.name} is not current; run make docs"
    assert build["table"]() in (ROOT / "README.md").read_text("utf-8"), "README.md is not current; run make docs"


@pytest.mark.full
def test_pages_are_what_the_schemes_say():
    found = run("docs/build.py", "--check")
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_kernels_of_the_readme_are_those_of_the_results():
    stored = json.loads((ROOT / "benchmarks" / "results" / "2026-11-15-kernels-h200.json").read_text("utf-8"))["rows"]
    own = [row for row in stored if row["shape"] == [65536, 768]]
    page = (ROOT / "README.md").read_text("utf-8")
    for case, title in {
        "geodesic step": "geodesic (GeoNorm)", "add + norm (pre)": "add + norm (Pre-Norm)",
        "norm of sum (post)": "norm of sum (Post-Norm)", "norm-add-norm (peri)": "norm-add-norm (Peri-LN)",
    }.items():  # fmt: skip
        there, back = (row for row in own if row["case"] == case)
        cells = [f"{there[key]:{form}} / {back[key]:{form}}" for key, form in
                 (("share", ".2f"), ("over_eager", ".0f"), ("over_compiled", ".2f"))]  # fmt: skip
        assert f"| {title} | {' | '.join(cells)} |" in page


def test_every_module_imports():
    for module in pkgutil.walk_packages(normlab.__path__, "normlab."):
        importlib.import_module(module.name)


def test_the_tree_in_the_documentation_is_the_tree():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "normlab").iterdir():
        if path.suffix == ".py" and path.name not in ("__init__.py", "errors.py"):
            assert path.name in page, path.name


def test_the_modules_that_a_command_passes_through_exist():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    paths = re.findall(r"`(\w+/[\w/]+\.py)`", page[: page.index("## Every module")])
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / "normlab" / path).is_file()] == []


def test_the_citation_names_the_version():
    assert f"version: {normlab.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_hooks_use_the_pinned_linter():
    (ruff,) = re.findall(r'"ruff==([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert f"rev: v{ruff}\n" in (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
