"""The report reads what runs and comparisons write: finished, under way, failed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from normlab.compare import compare, report
from normlab.compare.report.results import load_results
from normlab.train.trainer import train
from tests.compare import small
from tests.compare.small import configuration


def test_a_comparison_is_read_whole(whole: Path, tmp_path: Path) -> None:
    results = load_results(whole)
    assert (results.schemes, results.baseline, results.metric.name) == (["pre", "post"], "pre", "val_loss")
    assert results.problem is None
    assert [len(own.finished) for own in results.standings] == [2, 2]
    # Rows are read with their metrics: every step, the evaluations and the profiles.
    assert all(
        len(run.metrics.step) == small.SHORT and run.metrics.eval and run.metrics.profile for run in results.runs
    )
    page = report.build(whole, out=tmp_path / "page.html").read_text()
    assert "normlab compare" in page


def test_a_run_under_way_is_read_like_one_that_has_ended(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:-1]))
    ended, without_row = load_results(whole).runs[-1], load_results(folder).runs[-1]
    assert without_row.id == ended.id
    assert without_row.config.keys() == ended.config.keys()
    for name in ("scheme", "lr", "seed", "versions"):
        assert getattr(without_row, name) == getattr(ended, name)
    for name in ("loss", "bits_per_byte", "tokens", "steps", "device"):
        assert without_row.row[name] == ended.row[name], name


def test_the_reason_of_a_failed_run_is_read(text: Path, tmp_path: Path) -> None:
    wild = {"depth": 12, "trouble": "stop", "clip": math.inf, "warmup": 0.0}
    config = configuration(text, schemes=("none",), baseline="none", of_base=wild)
    result = train(config.run("none", 100.0, 0), tmp_path / "run", progress=False)
    assert result.state == "failed"
    run = load_results(tmp_path / "run").runs[0]
    assert (run.state, run.reason) == ("failed", result.reason)


def test_a_comparison_that_has_not_begun_has_a_page(text: Path, tmp_path: Path) -> None:
    assert compare(configuration(text), tmp_path, progress=False, minutes=1e-9) == []
    assert "no run has ended yet" in report.build(tmp_path).read_text()
