"""The notebook has the cells of docs/tour.py with their outputs, is small enough to open, and its cells run."""

from __future__ import annotations

import json
import runpy

import pytest

from tests.documentation.commands import ROOT

BUILDER = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
CELLS = BUILDER["cells"](BUILDER["SOURCE"].read_text("utf-8"))
SMALLER = (
    ("DEPTH, DIM, STEPS = 8, 64, 60", "DEPTH, DIM, STEPS = 2, 32, 2"),
    ("CHECK_DEPTHS = (6, 12)", "CHECK_DEPTHS = (2, 4)"),
    ("max_seconds=600", "max_seconds=600, steps=2"),
    ("time=10.0, looks=20", "time=1.0, looks=4"),
    ("torch.set_num_threads(1)", "pass"),
)


def notebook() -> dict:
    return json.loads(BUILDER["NOTEBOOK"].read_text("utf-8"))


def test_a_script_is_cut_into_cells():
    script = "# not shown\n# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\na = 1\n\n\nb = 2\n"
    assert BUILDER["cells"](script) == [("markdown", "# Title\n\nText."), ("code", "a = 1\n\n\nb = 2")]


def test_its_cells_are_those_of_the_script():
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in notebook()["cells"]] == CELLS


def test_it_was_executed_without_an_error_and_is_small():
    cells = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert BUILDER["NOTEBOOK"].stat().st_size < BUILDER["LARGEST"]


@pytest.mark.full
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is an extra")
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.chdir(tmp_path)
    program = "\n\n".join(text for kind, text in CELLS if kind == "code")
    for before, after in SMALLER:
        assert before in program
        program = program.replace(before, after)
    exec(compile(program, "tour", "exec"), {})
    plt.close("all")
    assert "nats a byte" in capsys.readouterr().out
