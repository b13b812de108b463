"""`compare --eval`: scores of the judging runs, their table beside the loss, and mistakes said before training."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from normlab.compare.report.results import ReportedRun, Results
from normlab.compare.report.scores import scores_table
from normlab.compare.scores import FILE
from normlab.evaluation.score import Score
from normlab.evaluation.store import Store
from normlab.numerics.student_t import t_interval
from tests.command import normlab
from tests.compare.report import synthetic
from tests.compare.small import held_out, write_text

SMALL = (
    "compare --schemes pre peri --lrs 1e-2 --seeds 2 --depth 1 --dim 16 --heads 2 --tokens 1536 --length 32 "
    "--batch 4 --eval-tokens 300 --device cpu --workers 1 --saves 0 --evals 1"
)
VALUES = {"pre": [0.5, 0.6, 0.4], "peri": [0.7, 0.65, 0.62]}


def results(folder) -> Results:
    runs = [
        ReportedRun(id=f"{scheme}-{seed}", scheme=scheme, label=scheme, state="done", lr=1e-3, seed=seed, role="judge")
        for scheme in VALUES
        for seed in range(3)
    ]
    return Results(folder=folder, kind="comparison", runs=runs, baseline="pre")


def test_the_table_has_paired_differences(tmp_path):
    store = Store(tmp_path / FILE)
    for scheme, values in VALUES.items():
        for seed, value in enumerate(values):
            score = Score(task="cloze", metric="acc", value=value, stderr=0.1, samples=5)
            store.add(f"{scheme}{seed}", [score], run=f"elsewhere/runs/{scheme}-{seed}", settings={"limit": 5})
    unknown = Score(task="cloze", metric="acc", value=9.0, stderr=None, samples=5)
    store.add("x", [unknown], run="runs/of-another", settings={"limit": 5})
    table = scores_table(results(tmp_path))
    texts = [[cell.text for cell in row] for row in table.rows]
    gaps = np.subtract(VALUES["peri"], VALUES["pre"])
    half = t_interval(0.95, 2) * gaps.std(ddof=1) / math.sqrt(3)
    assert texts[0][:4] == ["pre", "cloze (first 5)", "acc", "0.5000"]
    assert texts[1][:5] == ["peri", "cloze (first 5)", "acc", f"{np.mean(VALUES['peri']):.4f}", f"+{gaps.mean():.4f}"]
    assert texts[1][5] == f"−{half - gaps.mean():.4f} to +{half + gaps.mean():.4f}"
    assert texts[1][6] == "3"
    assert table.rows[1][5].sort == pytest.approx(gaps.mean() - half)


def test_the_table_says_how_many_seeds_are_paired(tmp_path):
    store = Store(tmp_path / FILE)
    for scheme, seeds in {"pre": (1, 2), "peri": (0, 1, 2)}.items():
        for seed in seeds:
            score = Score(task="cloze", metric="acc", value=VALUES[scheme][seed], stderr=0.1, samples=5)
            store.add(f"{scheme}{seed}", [score], run=f"runs/{scheme}-{seed}", settings={"limit": None})
    base, peri = ([cell.text for cell in row] for row in scores_table(results(tmp_path)).rows)
    assert (base[6], peri[6]) == ("2", "3, 2 paired")
    assert peri[4] == f"+{np.subtract(VALUES['peri'], VALUES['pre'])[1:].mean():.4f}"


def test_questions_that_were_given_another_name_later_are_the_same(tmp_path):
    """A run of before the name changed keeps it in the file, and is a partner all the same."""
    store, settings = Store(tmp_path / FILE), {"kind": "choices", "questions": "1f", "limit": None}
    for scheme, name in (("pre", "q"), ("peri", "books/q.jsonl")):
        parts = [Score(task=task, metric="acc", value=VALUES[scheme][0], stderr=0.1, samples=5) for task in (name, "t")]
        store.add(scheme, parts, run=f"runs/{scheme}-0", task=name, settings=settings)
    rows = [[cell.text for cell in row] for row in scores_table(results(tmp_path)).rows]
    assert [row[:2] for row in rows] == [
        ["pre", "books/q.jsonl"], ["peri", "books/q.jsonl"], ["pre", "t"], ["peri", "t"]
    ]  # fmt: skip
    assert rows[1][4] == "+0.2000"


def test_the_table_has_differences_over_groups(tmp_path):
    store = Store(tmp_path / FILE)
    books = {"pre": (0.4, 0.5, 0.6), "peri": (0.5, 0.7, 0.6)}
    for scheme, means in books.items():
        for seed, shift in enumerate((0.0, 0.1, 0.2)):
            groups = {name: (mean + shift, size) for name, mean, size in zip("abc", means, (10, 10, 20), strict=True)}
            score = Score(task="cloze", metric="acc", value=0.5, stderr=0.1, samples=40, groups=groups)
            store.add(f"{scheme}{seed}", [score], run=f"runs/{scheme}-{seed}", settings={"limit": None})
    table = scores_table(results(tmp_path))
    assert [column.title for column in table.columns][-2:] == ["Interval over groups", "Groups"]
    pre, peri = ([cell.text for cell in row] for row in table.rows)
    assert pre[-2:] == ["–", "–"]
    # Differences 0.1, 0.2 and 0 of 10, 10 and 20 questions; their mean is 0.075.
    error = math.sqrt(3 / 2 * (0.25**2 + 1.25**2 + 1.5**2)) / 40
    half = t_interval(0.95, 2) * error
    assert peri[-2:] == [f"−{half - 0.075:.4f} to +{half + 0.075:.4f}", "3"]


def test_other_groups_have_no_common_difference(tmp_path):
    store = Store(tmp_path / FILE)
    for scheme, names in (("pre", "ab"), ("peri", "ac")):
        score = Score(task="t", metric="acc", value=0.5, stderr=0.1, samples=8, groups=dict.fromkeys(names, (0.5, 4)))
        store.add(scheme, [score], run=f"runs/{scheme}-0", settings={"limit": None})
    assert [row[-2].text for row in scores_table(results(tmp_path)).rows] == ["–", "–"]


def test_lines_of_one_name_say_in_what_they_differ(tmp_path):
    """Other windows, or a text that was edited since: the lines looked the same, with other numbers."""
    store = Store(tmp_path / FILE)
    changes = ({}, {"length": 32}, {"text": "f" * 64}, {"text": "f" * 64, "length": 32})
    for number, change in enumerate(changes):
        score = Score(task="book.txt", metric="bits_per_byte", value=float(number), stderr=None, samples=5)
        settings = {"kind": "bits", "text": "0" * 64, "length": 64} | change
        store.add(str(number), [score], run="runs/pre-0", settings=settings)
    shown = [row[1].text for row in scores_table(results(tmp_path)).rows]
    first, last = "text 00000000", "text ffffffff"
    assert shown == [f"book.txt ({text}, length {length})" for text in (first, last) for length in (64, 32)]


def test_stuck_runs_are_part_of_no_score(tmp_path):
    """Their loss is part of no mean, and where a scheme has no other runs their scores looked like its own."""
    store = Store(tmp_path / FILE)
    of_comparison = results(tmp_path)
    stuck = [dataclasses.replace(run, row={"stuck": run.scheme == "peri"}) for run in of_comparison.runs]
    for run in stuck:
        score = Score(task="cloze", metric="acc", value=0.5, stderr=0.1, samples=5)
        store.add(run.id, [score], run=f"runs/{run.id}", settings={"limit": None})
    table = scores_table(dataclasses.replace(of_comparison, runs=stuck))
    assert [row[0].text for row in table.rows] == ["pre"]
    assert table.note is not None
    assert "stuck are left out" in table.note


def test_without_scores_there_is_no_table(tmp_path):
    assert scores_table(results(tmp_path)).rows == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eval-bits", "missing.txt"), "missing.txt"),
        (("--eval-files", "missing.yaml"), "missing.yaml does not exist"),
        (("--task", "images", "--eval-bits", "missing.txt"), "scores runs of the task language"),
        (("--eval-limit", "5"), "and there are none; name some, or leave it out"),
    ],
)
def test_a_mistake_is_said_before_training(words, message, tmp_path):
    data = () if "images" in words else ("--data", str(write_text(tmp_path / "text")))
    found = normlab("compare", *words, *data, "--out", str(tmp_path / "out"))
    assert found.returncode == 2
    assert message in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_stop_while_scoring_leaves_the_page_of_all_runs(tmp_path, monkeypatch):
    folder, text = synthetic.comparison(tmp_path / "out", steps=24), write_text(tmp_path / "text")

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("normlab.compare.comparison.compare", lambda *_, **__: [])
    monkeypatch.setattr("normlab.compare.comparison.left", lambda *_: 0)
    monkeypatch.setattr("normlab.compare.scores.score_judges", stop)
    found = normlab(*SMALL.split(), "--data", str(text), "--out", str(folder), "--eval-bits", str(held_out(text)))
    assert (found.returncode, found.stdout) == (130, f"page: {folder / 'report.html'}\n")
    assert found.stderr == (
        f"normlab: stopped while scoring; the page has all runs, and the scores that are in {folder / FILE}; "
        "the same command goes on with the others\n"
    )
    assert (folder / "report.html").is_file()


@pytest.mark.full
def test_judging_runs_are_scored_and_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    words = SMALL.split()
    places = ("--data", str(text), "--val-data", str(held_out(text)), "--out", str(tmp_path / "out"))
    found = normlab(*words, *places, "--eval-bits", str(held_out(text)))
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "out" / FILE).read_text())["results"]
    assert len({row["weights"] for row in rows}) == 4
    assert "Scores on tasks and texts" in (tmp_path / "out" / "report.html").read_text()
    again = normlab(*words, *places, "--eval-bits", str(held_out(text)))
    assert again.stderr.count("done before") == 4
    # Rows that came from another machine, without the runs: those with scores keep them, the others are named.
    shutil.rmtree(tmp_path / "out" / "runs")
    assert "not scored" not in normlab(*words, *places, "--eval-bits", str(held_out(text))).stderr
    (tmp_path / "out" / FILE).unlink()
    lost = normlab(*words, *places, "--eval-bits", str(held_out(text))).stderr
    (line,) = (line for line in lost.splitlines() if "not scored" in line)
    assert line.count("seed") == 4
