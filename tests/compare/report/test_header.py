"""What stands under the title: data, size, validation set; and what the terminal ends with."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from normlab.compare.report import terminal
from normlab.compare.report.header import header_facts
from normlab.compare.report.markdown import markdown
from normlab.compare.report.page import reproduce_commands
from normlab.compare.report.results import load_results
from normlab.compare.report.tables import run_table, speed_table
from normlab.compare.report.verdict import verdict
from normlab.train.trainer import train
from tests.compare import small
from tests.compare.report import synthetic

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_a_stored_comparison_says_what_was_trained_on_what() -> None:
    found = dict(header_facts(load_results(RESULTS / "2026-11-16-books-125m")))
    assert found["data"] == "books/books-train-*.jsonl.xz: 3 files, 49.8 MB"
    assert found["depth × width"] == "12 × 768"
    # 12 blocks of 4 · 768² + 3 · 768 · 2048 and a tied head of 32,768 · 768: the table of the ladder says 110.1M.
    assert found["parameters"] == "110M"
    assert found["validation set"] == "748k tokens"
    assert found["tokens a run"] == "33M"


def test_image_runs_count_images_where_text_runs_count_tokens() -> None:
    """A user gives --images; blocks process 17 tokens of every image of 8 × 8."""
    results = load_results(RESULTS / "2026-11-15-digits-6")
    found = dict(header_facts(results))
    assert (found["images a run"], "tokens a run" in found) == ("60k", False)
    assert verdict(results).headline.startswith(
        "No winner: no scheme is shown to reach a higher validation accuracy than pre at 60k images a run."
    )
    assert "60k images a run" in markdown(results.folder)
    runs, speed = run_table(results), speed_table(results)
    assert (runs.columns[-1].title, runs.rows[0][-1].text) == ("Images", "60k")
    assert speed.columns[1].title == "Images/s"


def test_a_comparison_records_its_parameters_and_how_much_it_evaluates_on(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", steps=24)
    about = json.loads((folder / "compare.json").read_text())
    corpus = {"source": "<b>books</b>", "val": {"documents": 3, "tokens": 900_000, "bytes": 1}}
    more = {"parameters": {"pre": 1_230_000, "post": 1_240_000}, "corpus": corpus, "base": {"eval_tokens": 200_000}}
    (folder / "compare.json").write_text(json.dumps(about | more))
    found = dict(header_facts(load_results(folder)))
    assert found["parameters"] == "1.23M to 1.24M"
    assert found["validation set"] == "200k of 900k tokens"
    assert found["depth × width"] == "8 × 256"
    assert found["runs"] == "36, 1 failed"


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not {"data", "parameters", "depth × width"} & dict(header_facts(load_results(tmp_path))).keys()


def test_a_run_shows_the_command_that_made_it(tmp_path: Path) -> None:
    text = small.write_text(tmp_path / "text")
    command = ["normlab", "train", "--data", "a text"]
    train(small.base(text, steps=2, evals=1), tmp_path / "run", progress=False, command=command)
    _, line, report = reproduce_commands(load_results(tmp_path / "run"))
    assert line == "normlab train --data 'a text'"
    assert report == "normlab report run"
    found = dict(header_facts(load_results(tmp_path / "run")))
    assert (found["depth × width"], found["data"]) == ("2 × 16", str(text))


def test_the_terminal_ends_with_the_table_and_the_headline(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", steps=24)
    out = io.StringIO()
    terminal.print_ranking(folder, Console(file=out, width=1000))
    lines = [line.strip() for line in out.getvalue().split("\n") if line.strip()]
    assert lines[0].split()[:3] == ["Scheme", "Validation", "loss"]
    peri = next(line for line in lines if line.startswith("peri"))
    assert "−0.058 to −0.042" in peri
    assert "▼ better" in peri
    # A label is text, whatever it looks like.
    assert any("post <script>alert(1)</script>" in line for line in lines)
    assert lines[-1].startswith("peri reaches the lowest validation loss")


def test_a_comparison_without_rows_has_words_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text("{}")
    out = io.StringIO()
    terminal.print_ranking(tmp_path, Console(file=out, width=200))
    assert out.getvalue() == "No verdict: no run has ended yet.\n"
