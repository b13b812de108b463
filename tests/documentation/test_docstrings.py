"""Examples in the docstrings of `normlab`'s names compile; those that need nothing but `normlab` are run, smaller."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import normlab

SMALLER = {
    "check": [("depths=(12, 24)", "depths=(2, 4), steps=2, start_size='none'")],
    "check_coordinates": [("base_dim=64, depths=(4, 8, 16)", "base_dim=16, widths=(16, 32), depths=(2,), steps=2")],
    "simulate": [("tokens=64", "tokens=8, time=1.0")],
}
"""Names whose examples are whole programs, with settings that take seconds."""


def example(name: str) -> str:
    """The indented blocks of a docstring, as one program."""
    text = inspect.getdoc(getattr(normlab, name)) or ""
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


SHOWN = [name for name in normlab.__all__ if inspect.isroutine(getattr(normlab, name)) and example(name)]


@pytest.mark.parametrize("name", SHOWN)
def test_its_example_compiles_and_calls_it(name):
    tree = ast.parse(example(name))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert f"normlab.{name}" in called


def test_there_are_examples():
    assert set(SMALLER) | {"probe"} <= set(SHOWN)


@pytest.mark.parametrize("name", ["check", "check_coordinates", "ladder", "probe", "simulate"])
def test_its_first_line_is_a_sentence(name):
    first = (inspect.getdoc(getattr(normlab, name)) or "").splitlines()[0]
    assert re.search(r"[.?]$", first), first


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLER)
def test_its_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = example(name)
    for before, after in SMALLER[name]:
        assert before in program, f"the docstring of {name} no longer has {before!r}"
        program = program.replace(before, after)
    exec(compile(program, name, "exec"), {"normlab": normlab})
