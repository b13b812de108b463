"""Folders as they are found: whole, torn, empty, under way."""

from __future__ import annotations

import html
import json
import math
import shutil
from pathlib import Path

import pytest

from normlab.compare.report import build
from normlab.compare.report.copying import copying_table
from normlab.compare.report.plots import PROFILE_STEPS, plot_data
from normlab.compare.report.results import find_field, load_results
from normlab.compare.report.run_metrics import (
    PROFILES,
    Metrics,
    metric_columns,
    metrics_of_row,
    profile_values,
    read_metrics,
    with_seconds,
)
from normlab.compare.report.tables import trouble_table
from normlab.compare.store import Store
from normlab.errors import NormLabError
from tests.compare.report import synthetic

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_a_comparison_is_read_whole(tmp_path: Path) -> None:
    results = load_results(synthetic.comparison(tmp_path / "c", running=True))
    assert results.kind == "comparison"
    assert results.schemes == ["pre", "post", "peri", "geonorm"]
    assert len(results.runs) == 4 * (2 * 3 + 3) + 1
    assert [run.state for run in results.runs].count("failed") == 1
    under_way = results.runs[-1]
    assert (under_way.state, under_way.scheme, under_way.role) == ("running", "geonorm", None)
    assert {run.role for run in results.chosen("peri")} == {"judge"}
    assert all(len(run.metrics.eval) == 12 for run in results.chosen("peri"))


def test_a_run_is_read_from_its_folder_alone(tmp_path: Path) -> None:
    run = load_results(synthetic.run(tmp_path / "r")).runs[0]
    assert (run.scheme, run.lr, run.seed, run.state) == ("peri", 1e-3, 7, "done")
    assert run.row["loss"] == pytest.approx(run.metrics.eval[-1]["loss"])
    assert run.row["steps"] == 120


def test_a_folder_that_is_neither_is_named(tmp_path: Path) -> None:
    with pytest.raises(NormLabError, match="neither a comparison"):
        load_results(tmp_path)
    with pytest.raises(NormLabError, match="no folder"):
        load_results(tmp_path / "absent")


def test_metrics_survive_anything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"kind": "step", "step": 1, "loss": NaN}', '{"kind": "step", "step": 2, "loss": 3.5}', "[]", "null", "\x00",
        '{"kind": "step"}', '{"kind": "other", "step": 1}', '{"kind": "eval", "step": 2, "loss": -Infinity}',
        '{"kind": "step", "step": 3, "lo',
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    found = read_metrics(path)
    assert [record["step"] for record in found.step] == [1, 2]
    assert metric_columns(found.step, ["loss"], 1) == {"loss": [None, 3.5]}
    assert metric_columns(found.eval, ["loss", "absent"], 1) == {"loss": [None], "absent": [None]}
    assert found.last("loss") == 3.5
    assert read_metrics(tmp_path / "absent").step == []


def test_points_are_means_of_buckets_shared_by_all_runs() -> None:
    long = [{"step": k, "loss": float(k)} for k in range(1, 11)]
    assert metric_columns(long, ["step", "loss"], 4) == {"step": [2.5, 6.5, 9.5], "loss": [2.5, 6.5, 9.5]}
    # A run that ended early has the same points, only fewer.
    assert metric_columns(long[:8], ["step"], 4) == {"step": [2.5, 6.5]}
    holes = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 4.0}]
    assert metric_columns(holes, ["loss"], 2) == {"loss": [4.0]}


def test_evaluations_get_the_clock_of_the_steps_around_them() -> None:
    steps = [{"step": 10, "seconds": 1.0}, {"step": 20, "seconds": 3.0}, {"step": 30, "seconds": None}]
    assert [r["seconds"] for r in with_seconds(steps, [{"step": 15}, {"step": 20}, {"step": 99}])] == [2.0, 3.0, 3.0]
    assert with_seconds([], [{"step": 1}]) == [{"step": 1}]


def test_one_value_a_block_belongs_to_the_boundary_where_it_ends() -> None:
    record = {"layers": [0, 1, 2], "hidden_rms": [1.0, 2.0, math.nan], "angular_speed": [0.5, 0.25], "grad_norm": None}
    assert profile_values(record, "hidden_rms") == {0: 1.0, 1: 2.0}
    assert profile_values(record, "angular_speed") == {1: 0.5, 2: 0.25}
    assert profile_values(record, "grad_norm") == {}
    assert profile_values({}, "hidden_rms") == {}


def test_find_prefers_the_outermost_field() -> None:
    assert find_field({"a": {"lr": 2}, "lr": 1}, "lr") == 1
    assert find_field({"a": {"b": {"lr": 2}}}, "rate", "lr") == 2
    assert find_field({"lr": None}, "lr") is None
    assert find_field(None, "lr") is None


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    folder = synthetic.run(tmp_path / "r", profiles=False)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps({"kind": "step", "step": step, "tokens": step, "loss": 1.0, "seconds": step}) + "\n")
            if step % 50 == 0:
                file.write(json.dumps({"kind": "profile", "step": step, "layers": [0], "hidden_rms": [1.0]}) + "\n")
    data = plot_data(load_results(folder), 0.5)
    assert len(data["curves"][0]["train"]["value"]) == 1000
    assert len(data["profiles"]["steps"]) == PROFILE_STEPS
    assert data["profiles"]["steps"][0] == 50
    assert data["profiles"]["steps"][-1] == 5000


def test_every_series_of_a_profile_is_shown_if_it_was_recorded(tmp_path: Path) -> None:
    profiles = plot_data(load_results(synthetic.comparison(tmp_path / "c", steps=24)), 0.5)["profiles"]
    assert profiles["names"] == list(PROFILES)
    entry = next(one for one in profiles["series"] if one["step"] == profiles["steps"][-1])
    # Boundaries without a value are left out: no block ends at the first, and not every rank is computed.
    assert [layer for layer, _ in entry["update_ms"]] == list(range(1, 9))
    assert [layer for layer, _ in entry["effective_rank"]] == list(range(0, 9, 2))
    old = [{"step": 0, "layers": [0, 1], "hidden_rms": [1.0, 2.0], "grad_norm": [1.0, 1.0]}]
    folder = synthetic.comparison(tmp_path / "old", profiles=False, steps=24)
    shutil.rmtree(folder / "runs")
    rows = [row | {"profiles": old} for row in Store(folder).rows()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_data(load_results(folder), 0.5)["profiles"]["names"] == ["hidden_rms", "grad_norm"]


def test_copying_is_told_through_training(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", hostile=False, steps=24)
    table = copying_table(load_results(folder))
    steps = [int(column.title.removeprefix("Step ")) for column in table.columns[1:]]
    assert steps == list(range(2, 25, 2))
    # The synthetic runs gain 6 nats in proportion to their progress; printed with two digits.
    assert [float(cell.text) for cell in table.rows[0][1:]] == pytest.approx([6.0 * k / 24 for k in steps], abs=0.005)


def test_without_profiles_there_is_no_table_of_copying(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", profiles=False, steps=24)
    assert copying_table(load_results(folder)).rows == []


def test_trouble_is_counted_for_each_scheme(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", hostile=False, steps=24)
    table = trouble_table(load_results(folder))
    titles = [column.title for column in table.columns]
    assert titles == ["Scheme", "Runs", "Spikes", "Non-finite steps", "Skipped steps", "Rollbacks", "Sensitivity"]
    found = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    runs = len(load_results(folder).runs) // 4
    # From the events of the runs: one of post's failed at a value that was not finite.
    assert found["pre"][:5] == [str(runs), "0", "0", "0", "0"]
    assert found["post"][:5] == [str(runs), "0", "1", "0", "0"]
    assert found["pre"][5] == f"{1 + 3 * synthetic.SCHEMES['pre'][1]:.3g}"
    # From the rows, where they have counts.
    rows = [row | {"spikes": 2, "skipped": 1, "sensitivity": 4.0} for row in Store(folder).rows()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = {row[0].text: [cell.text for cell in row[1:]] for row in trouble_table(load_results(folder)).rows}
    assert again["pre"] == [str(runs), str(2 * runs), "0", str(runs), "0", "4"]


def test_rows_of_version_0_1_have_no_counts(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c")
    shutil.rmtree(folder / "runs")
    assert trouble_table(load_results(folder)).rows == []


def test_a_row_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", schemes=["pre"])
    synthetic.run(tmp_path / "outside")
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[0]) | {"run": "../../outside"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = next(run for run in load_results(folder).runs if run.id == "../../outside")
    assert found.metrics.step == []


def test_a_row_without_its_run_tells_its_course(tmp_path):
    row = {
        "steps": 4, "tokens": 40, "seconds": 2.0, "curve": {"every": 2, "mean": [3.0, 2.0], "max": [3.5, None]},
        "evals": {"step": [2, 4], "loss": [2.5, 2.1]}, "profiles": [{"step": 0, "layers": [0], "hidden_rms": [1.0]}],
    }  # fmt: skip
    found = metrics_of_row(row)
    assert [(one["step"], one["tokens"], one["seconds"], one["loss"]) for one in found.step] == [
        (2, 20, 1.0, 3.0), (4, 40, 2.0, 2.0)
    ]  # fmt: skip
    assert [(one["step"], one["loss"]) for one in found.eval] == [(2, 2.5), (4, 2.1)]
    assert found.profile == row["profiles"]
    # The rows of version 0.1 have none of it.
    assert metrics_of_row({"steps": 4, "tokens": 40, "seconds": 2.0}) == Metrics()


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/rows.jsonl")), ids=lambda path: path.parent.name)
def test_pages_of_stored_results_are_rebuilt(folder, tmp_path):
    page = build(folder.parent, out=tmp_path / "report.html").read_text()
    for row in map(json.loads, folder.read_text().splitlines()):
        assert f"{row['value']:.4f}" in page if row["state"] == "done" else str(html.escape(row["reason"])) in page
    assert not (folder.parent / "report.html").exists()
