"""`ladder` from the first rate to the page, on models so small that a run takes a second."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab.compare import compare, executor
from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.ladders.description import design_of, write_description
from normlab.ladders.forecast import read_forecasts, write_forecast
from normlab.ladders.ladder import LadderSession, ladder, open_data
from normlab.ladders.make_forecast import make_forecast
from normlab.ladders.outcome import outcome
from normlab.ladders.plan import LadderPlan
from normlab.ladders.report.cautions import cautions
from normlab.ladders.results import build, is_ladder, markdown, read_report
from normlab.ladders.size import Target
from normlab.train.trainer import train
from tests.command import normlab as run_command
from tests.compare import small
from tests.compare.here import Here
from tests.ladders.small import STEP, configuration, trained


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "ProcessPool", Here)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladders") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "ProcessPool", Here)
        ladder(configuration(text, target=("4x32:1M",)), folder, progress=False)
    return folder


def test_every_cell_has_its_rows(finished: Path, text: Path) -> None:
    rows = [row for row in Store(finished).rows() if row["role"] == "judge"]
    cells = {(row["scheme"], row["size"], row["budget"], row["seed"]) for row in rows}
    assert len(cells) == len(rows) == 2 * 3 * 2 * 2
    assert {row["state"] for row in rows} == {"done"}
    assert all(row["flops"] > 6 * row["parameters"] * row["budget"] * 0.1 for row in rows)
    ended = outcome(configuration(text), finished)
    assert (ended.exit_code, ended.left) == (0, 0)


def test_the_largest_size_was_forecast_before_it_was_trained(finished: Path) -> None:
    (stored,) = read_forecasts(finished)
    assert stored.size == "2x16"
    assert stored.rows == 2 * 2 * 2 * 2
    rows = Store(finished).rows()
    of_top = [row for row in rows if row["size"] == "2x16"]
    assert {row["forecast"] for row in of_top} == {stored.hash}
    assert min(row["started"] for row in of_top) >= stored.written
    assert not any("forecast" in row for row in rows if row["size"] != "2x16")


def test_a_branch_equals_the_run_that_was_planned_with_its_budget(finished: Path, text: Path, tmp_path: Path) -> None:
    rows = Store(finished).rows()
    branch = next(row for row in rows if row["budget"] == 10 * STEP and row["size"] == "1x16")
    config = configuration(text)
    planned = config.run(config.rungs[1], branch["scheme"], 10 * STEP, branch["base_lr"], branch["seed"])
    assert planned.name == branch["run"]
    assert train(planned, tmp_path / "planned", progress=False).loss == branch["loss"]


def test_checkpoints_of_branches_are_removed_when_no_run_needs_them(finished: Path) -> None:
    assert not list(finished.glob("runs/*/branches/*"))


def test_the_same_call_again_trains_nothing(finished: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "ProcessPool", None)
    assert ladder(configuration(text), finished, progress=False).baseline == "pre"


def test_another_ladder_is_refused(finished: Path, text: Path) -> None:
    for changes, message in (
        ({"budgets": (10 * STEP, 30 * STEP)}, "its budgets"),
        ({"schemes": ("pre",)}, "its schemes have peri"),
        ({"seeds": 1}, "its seeds is 2, not 1"),
        ({"top_seeds": 1}, "its top_seeds is 2, not 1"),
        ({"of_base": {"weight_decay": 0.2}}, "its weight_decay"),
    ):
        with pytest.raises(NormLabError, match=message):
            ladder(configuration(text, **changes), finished, progress=False)


def test_a_ladder_and_a_comparison_do_not_share_a_folder(text: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, file in ((first, "compare.json"), (second, "ladder.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    with pytest.raises(NormLabError, match=r"holds a comparison \(compare\.json\); choose another folder"):
        ladder(configuration(text), first, progress=False)
    with pytest.raises(NormLabError, match=r"holds a ladder \(ladder\.json\); choose another folder"):
        compare(small.configuration(text), second, progress=False)
    assert not (first / "ladder.json").exists()
    assert not (second / "compare.json").exists()


def test_results_and_markdown(finished: Path) -> None:
    assert is_ladder(finished)
    content = read_report(finished)
    assert content.answer.baseline == "pre"
    assert [own.scheme for own in content.answer.schemes] == ["peri"]
    assert len(content.answer.schemes[0].cells) == 6
    assert content.design.held_out == "2x16"
    assert "peri" in markdown(finished)


def test_rows_restored_from_elsewhere_are_named(finished: Path, tmp_path: Path) -> None:
    for name in ("ladder.json", "forecast.json", "rows.jsonl"):
        shutil.copy(finished / name, tmp_path / name)
    rows = Store(tmp_path).rows()
    for row in rows[:2]:
        for name in ("curve", "evals", "profiles", "first_loss"):
            row.pop(name, None)
        row |= {"seconds": 0.0, "tokens_per_s": None, "gpu": None, "restored": "from what it printed; times were lost"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"2 of {len(rows)} runs ({rows[0]['label']}) were restored from what it printed; times were lost."
    assert words in cautions(read_report(tmp_path))
    assert words in build(tmp_path).read_text()


def test_rows_that_began_before_the_forecast_are_refused(finished: Path, tmp_path: Path) -> None:
    for name in ("ladder.json", "forecast.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    rows = Store(finished).rows()
    for row in rows:
        early = row["size"] == "2x16"
        Store(tmp_path).append(row | ({"started": "2020-01-01T00:00:00+00:00"} if early else {}))
    with pytest.raises(NormLabError, match="began before the forecast"):
        read_report(tmp_path)


def test_a_forecast_that_could_not_be_made_is_named_with_the_reason(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (stored,) = read_forecasts(copy)
    none = replace(stored, cells=[], reason="the ladder has no rows").signed()
    (copy / "forecast.json").unlink()
    write_forecast(copy, none)
    rows = (copy / "rows.jsonl").read_text().replace(stored.hash, none.hash)
    (copy / "rows.jsonl").write_text(rows)
    assert "No forecast of 2x16 could be made: the ladder has no rows." in markdown(copy)
    assert "could be made" not in markdown(finished)


@pytest.mark.usefixtures("here")
def test_a_scheme_that_is_added_is_forecast_before_it_is_trained_at_the_largest_size(
    finished: Path, text: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    ladder(configuration(text, schemes=("pre", "peri", "layerscale")), copy, progress=False)
    first, second = read_forecasts(copy)
    assert second.schemes == ["layerscale"]
    assert {cell.scheme for cell in second.cells} == {"layerscale"}
    own = [row for row in Store(copy).rows() if row["scheme"] == "layerscale"]
    of_top = [row for row in own if row["size"] == "2x16"]
    assert {row["forecast"] for row in of_top} == {second.hash}
    assert max(row["finished"] for row in own if row not in of_top) <= second.written
    assert second.written <= min(row["started"] for row in of_top)
    content = read_report(copy)
    assert {entry.scheme for entry in content.held_out} == {"peri", "layerscale"}
    told = markdown(copy)
    for one in (first, second):
        assert one.hash in told
        assert f"written on {one.written[:10]} at {one.written[11:16]}" in told
    assert "was made from have changed" not in told


def test_a_scheme_that_cannot_be_forecast_is_named_with_the_reason() -> None:
    plan = LadderPlan(configuration(schemes=("pre", "peri", "post")))
    rows = [row | {"stuck": row["scheme"] == "post"} for row in trained(plan, lambda run: 3.0 + 0.01 * run.config.seed)]
    made = make_forecast(plan, rows, plan.without_forecast)
    assert {cell.scheme for cell in made.cells} == {"peri"}
    assert (made.schemes, made.reason) == (["pre", "peri", "post"], None)
    assert list(made.without) == ["post"]
    assert "no cell at a smaller size counts (unreliable: seed 0 of post stuck" in made.without["post"]
    far = [row | {"loss": row["loss"] + 0.5 * (row["scheme"] == "peri")} for row in rows]
    too_large = make_forecast(plan, far, plan.without_forecast).without["peri"]
    assert too_large == "a gap of 0.50 nats is too large for the assumptions of a forecast"
    none = make_forecast(plan, [row | {"stuck": True} for row in rows], plan.without_forecast)
    assert none.cells == []
    assert none.reason == "the smaller sizes allow none of any scheme"


def test_rows_of_the_largest_size_without_a_forecast_are_refused(finished: Path, text: Path, tmp_path: Path) -> None:
    for name in ("ladder.json", "rows.jsonl"):
        shutil.copy(finished / name, tmp_path)
    with pytest.raises(NormLabError, match=r"no forecast.json .*restore that file"):
        read_report(tmp_path)
    with pytest.raises(NormLabError, match=r"forecast.json is missing, but rows were run after the forecast"):
        ladder(configuration(text), tmp_path, progress=False)


def test_runs_of_the_largest_size_that_began_before_a_forecast_are_not_taken_up(
    finished: Path, text: Path, tmp_path: Path
) -> None:
    """Without their rows and the forecast they would be dated anew, after the forecast that is written now."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    kept = [row for row in Store(finished).rows() if row["size"] != "2x16"]
    (copy / "rows.jsonl").unlink()
    Store(copy).append_all(kept)
    (copy / "forecast.json").unlink()
    with pytest.raises(NormLabError, match=r"began before a forecast of pre at 2x16 was written; remove that folder"):
        ladder(configuration(text), copy, progress=False)
    assert not (copy / "forecast.json").exists()


@pytest.mark.usefixtures("here")
def test_a_ladder_goes_on_from_a_copy_of_its_results_alone(finished: Path, text: Path, tmp_path: Path) -> None:
    """Without checkpoints a branch whose trunk has ended is trained from its first step, to the same loss."""
    for name in ("ladder.json", "forecast.json"):
        shutil.copy(finished / name, tmp_path)
    rows = Store(finished).rows()
    lost = {row["run"] for row in rows if row["scheme"] == "peri" and row["size"] == "1x16" and row["seed"] == 1}
    branch = {row["run"] for row in rows if row["trunk"] != row["run"] and row["run"] not in lost}
    kept = [row for row in rows if row["run"] not in lost | {min(branch)}]
    for row in kept:
        Store(tmp_path).append(row)
    ladder(configuration(text), tmp_path, progress=False)
    again = {row["run"]: row["loss"] for row in Store(tmp_path).rows()}
    assert len(again) - len(kept) == 3
    assert again == {row["run"]: row["loss"] for row in rows}


@pytest.mark.usefixtures("here")
def test_a_branch_without_the_state_of_its_trunk_begins_at_its_first_step(text: Path, tmp_path: Path) -> None:
    """So that a slice on another machine expects it to take as long as it does."""
    data, config = open_data(configuration(text), progress=False)
    plan = LadderPlan(config)
    session = LadderSession(plan, tmp_path, data, progress=False)
    trunk, branch, *_ = plan.judged(config.rungs[0], plan.rates.found([]))
    assert session.start_step(branch) == 0
    (tmp_path / "runs" / trunk.name / "branches" / f"step-{branch.first_step:08d}").mkdir(parents=True)
    assert session.start_step(branch) == branch.first_step > 0
    assert session.start_step(trunk) == 0


def test_a_slice_in_which_no_judged_run_ends_has_a_page_and_no_answer(text: Path, tmp_path: Path) -> None:
    config = configuration(text, lrs=(1e-2, 2e-2))
    found = ladder(config, tmp_path, progress=False, minutes=1e-9)
    assert found.schemes == []
    assert outcome(config, tmp_path).exit_code == 130
    assert "No verdict" in build(tmp_path).read_text()
    assert "not finished" in (tmp_path / "report.json").read_text()
    assert "# Ladder" in markdown(tmp_path)


def test_the_report_is_rebuilt_as_page_json_and_markdown(finished: Path, tmp_path: Path) -> None:
    page = build(finished)
    assert page == finished / "report.html"
    stored = json.loads((finished / "report.json").read_text())
    assert stored["answer"]["baseline"] == "pre"
    assert stored["answer"]["priors"]["smooth"]
    assert stored["design"]["runs_left"] == 0
    assert json.loads(build(finished, out=tmp_path / "ladder.json").read_text()) == stored
    with pytest.raises(NormLabError, match=r"ladder\.md must end in \.html"):
        build(finished, out=tmp_path / "ladder.md")
    done = run_command("report", str(finished), "--out", str(tmp_path / "other.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other.html").read_text() == page.read_text()


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_gaps_on_further_validation_sets_stand_beside_the_main_ones(text: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("zebra lion okapi " * 400)
    sets = {"val_sets": (f"animals={tmp_path / 'other.txt'}",)}
    config = configuration(text, sizes=("1x8", "1x16"), seeds=1, hold_out=False, of_base=sets)
    ladder(config, tmp_path / "out", progress=False)
    content = read_report(tmp_path / "out")
    (own,) = content.sets["animals"].schemes
    main, other = content.answer.schemes[0].cells[0].differences["0"], own.cells[0].differences["0"]
    assert main != other
    assert "animals" in markdown(tmp_path / "out")


def test_more_epochs_than_allowed_are_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(NormLabError, match=r"passes over the .* training tokens.*--epochs"):
        ladder(configuration(text, epochs=0.01), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(NormLabError) as refused:
        open_data(configuration(text, epochs=0.01), progress=False)
    enough = float(str(refused.value).rpartition("--epochs ")[2])
    open_data(configuration(text, epochs=enough), progress=False)


def test_a_target_without_tokens_is_refused() -> None:
    with pytest.raises(NormLabError, match="tokens must be positive"):
        Target.parse("16x1024:0")


@pytest.mark.usefixtures("here")
def test_a_trunk_that_is_lost_takes_its_cells_with_it_by_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(config: Any, folder: Path, **options: Any) -> Any:
        if config.model.scheme_object.label == "peri" and config.seed == 0:
            raise RuntimeError("out of luck")
        return train(config, folder, **options)

    monkeypatch.setattr("normlab.compare.run_one.train", lost)
    config = configuration(text, sizes=("1x8", "1x16"), hold_out=False)
    ladder(config, tmp_path, progress=False)
    rows = [row for row in Store(tmp_path).rows() if row["scheme"] == "peri" and row["seed"] == 0]
    assert len(rows) == 4
    assert {row["state"] for row in rows} == {"failed"}
    assert sum("its trunk" in row["reason"] for row in rows) == 2
    found = outcome(config, tmp_path)
    assert (found.left, found.exit_code) == (0, 1)
    content = read_report(tmp_path)
    assert len(content.design.lost) == 4
    assert not any(cell.is_usable for cell in content.answer.schemes[0].cells)


@pytest.mark.parametrize("repeat_failed", [False, True])
def test_branches_that_a_killed_call_did_not_give_up_are_given_up_by_the_next(
    tmp_path: Path, repeat_failed: bool
) -> None:
    """A call that is killed between the row of a stuck trunk and those of its branches must not wait for them."""
    plan = LadderPlan(configuration(repeat_failed=repeat_failed))
    lost = plan.runnable([])[0]
    rows = [row | {"stuck": row["run"] == lost.name} for row in trained(plan, lambda run: 3.0)]
    branches = {branch.name for branch in plan.branches(lost)}
    for row in rows:
        if row["run"] not in branches:
            Store(tmp_path).append(row)
    assert not plan.fitted_have_ended(Store(tmp_path).rows())
    data: Any = SimpleNamespace(fingerprint="none")
    session = LadderSession(plan, tmp_path, data, progress=False)
    session.give_up_lost_branches()
    assert plan.fitted_have_ended(session.rows)
    given_up = [row for row in Store(tmp_path).rows() if row["run"] in branches]
    assert {(row["state"], row["stuck"]) for row in given_up} == {("failed", True)}
    assert all("its trunk" in row["reason"] for row in given_up)


def test_rows_at_a_rate_that_is_no_longer_picked_are_set_aside(text: Path, tmp_path: Path) -> None:
    """A repeated tuning run may move the best rate; runs at the rate before it are then part of nothing."""
    data, config = open_data(configuration(text, lrs=(1e-2, 2e-2), hold_out=False), progress=False)
    plan = LadderPlan(config)
    before = trained(plan, lambda run: 3.0 if run.base_lr == 1e-2 else 3.5)
    moved = [row | {"loss": 2.0, "value": 2.0} for row in before if row["role"] == "tune" and row["base_lr"] == 2e-2]
    after = trained(
        plan, lambda run: 3.5, [row for row in before if row["run"] not in {m["run"] for m in moved}] + moved
    )
    for row in (*before, *after):
        Store(tmp_path).append(row)
    rows = Store(tmp_path).rows()
    write_description(tmp_path, config, data, design_of(plan, rows, data, ()))
    content = read_report(tmp_path)
    assert {row.lr for row in content.rows} == {2e-2}
    assert len(content.rows) == len([run for run in plan.known_runs(rows) if run.role == "judge"])
    assert make_forecast(plan, rows, plan.without_forecast).rows == len(
        [row for row in content.rows if row.size != "2x16"]
    )


@pytest.mark.full
def test_stopped_and_killed_ladders_go_on(text: Path, finished: Path, tmp_path: Path) -> None:
    """A ladder in slices, in processes, gives the losses of the one that was never stopped."""
    call = f"""
import sys
from tests.ladders.small import configuration
from normlab.ladders.ladder import ladder
from normlab.ladders.outcome import outcome
if __name__ == "__main__":
    config, minutes = configuration({str(text)!r}), 0.1
    while outcome(config, {str(tmp_path / "out")!r}).left:
        ladder(config, {str(tmp_path / "out")!r}, progress=False, minutes=minutes)
        minutes *= 1.5  # on a busy machine the first slices may be over before a process has started
"""
    script = tmp_path / "call.py"
    script.write_text(call)
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, str(script)], cwd=root, check=True, env=_environment(root), timeout=300)
    ours = {row["run"]: row["loss"] for row in Store(tmp_path / "out").rows()}
    assert ours == {row["run"]: row["loss"] for row in Store(finished).rows()}


def _environment(root: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(root)}


def test_a_target_within_the_ladder_is_refused(text: Path, tmp_path: Path) -> None:
    within = configuration(text, target=(f"2x16:{20 * STEP}",))
    with pytest.raises(NormLabError, match=r"has 1 times the compute of 2x16, .* the top of the ladder"):
        ladder(within, tmp_path / "ladder", progress=False)


def test_options_of_a_single_run_are_refused() -> None:
    done = run_command("ladder", "--tokens", "5k")
    assert done.returncode == 2
    assert "a ladder has no tokens of its own; name --budgets" in done.stderr
    assert json.dumps(done.stderr).count("\\n") == 1
