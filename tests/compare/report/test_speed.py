"""How fast a scheme is: without what compiles, and not from runs that stood in each other's way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from normlab.compare.report.cautions import cautions
from normlab.compare.report.gpu_sharing import runs_sharing_gpu
from normlab.compare.report.results import ReportedRun, load_results
from normlab.compare.report.run_metrics import Metrics
from normlab.compare.report.tables import median_cost, speed_table
from tests.compare.report import synthetic


def sharing(runs: list[ReportedRun]) -> set[str]:
    return runs_sharing_gpu((one.id, one.row) for one in runs)


def steps(seconds: list[float], tokens: int = 100, **fields: float) -> list[dict[str, Any]]:
    return [{"step": k, "tokens": k * tokens, "seconds": at, **fields} for k, at in enumerate(seconds, start=1)]


def test_speed_leaves_out_the_first_step() -> None:
    found = Metrics(step=steps([20.0, 20.5, 21.0, 21.5], tokens_per_s=400.0, mfu=0.5))
    assert found.tokens_per_s == pytest.approx(200.0)
    # The last record's speed is that of a few steps; half as fast is half the share.
    assert found.mfu == pytest.approx(0.25)


def test_speed_leaves_out_the_first_step_after_a_pause() -> None:
    resumed = {"kind": "event", "step": 2, "what": "resume"}
    found = Metrics(step=steps([20.0, 20.5, 35.0, 35.5]), event=[resumed])
    assert found.tokens_per_s == pytest.approx(200.0)


@pytest.mark.parametrize(
    "records",
    [[], steps([1.0]), [{"step": 1, "tokens": 5}, {"step": 2, "tokens": 9}], [{"step": 1}, {"step": 3}]],
    ids=["none", "one", "no clock", "a gap"],
)
def test_without_two_steps_there_is_no_speed(records: list[dict[str, Any]]) -> None:
    found = Metrics(step=records)
    assert found.tokens_per_s is None
    assert found.mfu is None


def test_a_run_without_metrics_has_the_speed_of_its_row() -> None:
    assert median_cost([run("a", "00:00", "00:05", tokens_per_s=7.0)]).speed == 7.0


def run(name: str, begin: str, end: str, gpu: str | None = "G", device: str = "H200", **row: Any) -> ReportedRun:
    times = {"started": f"2026-01-01T{begin}:00+00:00", "finished": f"2026-01-01T{end}:00+00:00"}
    known = {"gpu": gpu, "device": device, "peak_bytes": 5, **times, **row}
    return ReportedRun(id=name, scheme="pre", label="pre", state="done", row=known)


def test_runs_share_a_gpu_while_both_are_under_way() -> None:
    first, second, third = run("a", "00:00", "00:05"), run("b", "00:04", "00:09"), run("c", "00:09", "00:12")
    assert sharing([first, second, third]) == {"a", "b"}
    assert sharing([first, third]) == set()


def test_gpus_of_one_name_are_told_apart_where_rows_do() -> None:
    at_once = ("00:00", "00:05")
    assert sharing([run("a", *at_once, gpu="G1"), run("b", *at_once, gpu="G2")]) == set()
    assert sharing([run("a", *at_once, gpu=None), run("b", *at_once, gpu=None)]) == {"a", "b"}


def test_cpus_and_rows_without_times_are_not_counted() -> None:
    on_cpu = {"gpu": None, "device": "CPU, 1 thread", "peak_bytes": None}
    assert sharing([run("a", "00:00", "00:05", **on_cpu), run("b", "00:00", "00:05", **on_cpu)]) == set()
    assert sharing([run("a", "00:00", "00:05"), run("b", "00:00", "00:05", started="soon")]) == set()


@pytest.mark.parametrize("together", [False, True])
def test_ratios_need_runs_that_had_their_gpu_to_themselves(tmp_path: Path, together: bool) -> None:
    results = load_results(synthetic.comparison(tmp_path / "c", hostile=False, steps=24))
    if together:
        for own in results.runs:
            own.row["gpu"] = "the only one"
    table = speed_table(results)
    titles = [column.title for column in table.columns]
    peri = next(row for row in table.rows if row[0].text == "peri")
    shown = {title: cell.text for title, cell in zip(titles, peri, strict=True)}
    # What no row can say has no column.
    assert shown.get("Speed against pre") == (None if together else "94.0 %")
    assert shown.get("Of peak") == (None if together else "52.0 %")
    assert shown["Memory against pre"] == "106.4 %"
    assert shown["Tokens/s"] == "19.3k"
    assert ("11 of 11 runs shared a GPU" in table.note) == together


def test_a_cpu_has_no_share_of_its_peak(tmp_path: Path) -> None:
    results = load_results(synthetic.comparison(tmp_path / "c", hostile=False, steps=24))
    for own in results.runs:
        own.row["peak_bytes"] = None
    assert [column.title for column in speed_table(results).columns] == [
        "Scheme", "Tokens/s", "Speed against pre", "Run time",
    ]  # fmt: skip


def test_a_restored_row_has_no_duration_and_is_named(tmp_path: Path) -> None:
    """Its times of zero were not measured, and what is known of it comes from elsewhere."""
    folder = synthetic.comparison(tmp_path / "compared", fails=False, hostile=False)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    lost = [row for row in lines if (row["scheme"], row["role"]) == ("peri", "judge")][:2]
    for row in lost:
        row |= {"seconds": 0.0, "tokens_per_s": None, "gpu": None, "restored": "from what it printed; times were lost"}
        shutil.rmtree(folder / "runs" / row["run"])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    results = load_results(folder)
    cost = median_cost(results.chosen("peri"))
    measured = [row for row in lines if row["scheme"] == "peri" and row["role"] == "judge"][-1]
    assert cost.seconds == measured["seconds"] > 0.0
    assert f"2 of {len(lines)} runs (peri) were restored from what it printed; times were lost." in cautions(results)
