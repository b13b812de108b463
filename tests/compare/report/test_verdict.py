"""The words: a winner only where the intervals name one, every failure with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normlab.compare.report.results import load_results
from normlab.compare.report.verdict import Conclusion, level_note, verdict
from normlab.compare.store import Store
from tests.compare.report import synthetic


def words(folder: Path) -> Conclusion:
    return verdict(load_results(folder))


def rewrite(folder: Path, change: Any) -> None:
    """Replace every row by what `change` makes of it; None drops it."""
    rows = [changed for row in Store(folder).rows() if (changed := change(row)) is not None]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return synthetic.comparison(tmp_path / "c", hostile=False, profiles=False, steps=24)


def test_a_winner_is_named_with_its_size_and_interval(folder: Path) -> None:
    found = words(folder)
    assert found.headline.startswith("peri reaches the lowest validation loss: 0.050 below pre (95 % interval 0.042")
    # At which budget and rate it holds.
    assert "3 seeds; 98.3k tokens a run, rate 1.2e-3)." in found.headline
    assert any(line.startswith("geonorm is better: 0.023 below pre") for line in found.findings)


def test_a_failure_is_named_with_reason_step_and_layer(folder: Path) -> None:
    line = next(line for line in words(folder).findings if "1 of 9 runs failed" in line)
    for part in ("post", "not finite", "step 12", "layers.7.mlp", "seed 3"):
        assert part in line


def test_seeds_that_disagree_are_named(folder: Path) -> None:
    assert not any("seeds decide" in line for line in words(folder).cautions)

    def stuck(row: dict[str, Any]) -> dict[str, Any]:
        tuned = row["scheme"] == "peri" and row["role"] == "tune"
        return row | {"value": 6.958 if row["lr"] == 1.2e-3 else 6.96} if tuned else row

    rewrite(folder, stuck)
    (line,) = (line for line in words(folder).cautions if "seeds decide" in line)
    assert line.startswith("peri ended at 6.958, 6.958 and 6.958 with seeds that picked its rate, at 4.1")


def test_an_interval_that_spans_zero_names_no_winner(folder: Path) -> None:
    noise = {"pre": (0.0, 0.1, 0.2), "peri": (0.2, 0.0, 0.1), "geonorm": (0.1, 0.2, 0.0)}

    def noisy(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["scheme"] not in noise or row["role"] == "tune":
            return row if row["scheme"] in noise else None
        return row | {"value": 4.0 + noise[row["scheme"]][row["seed"] - 1]}

    rewrite(folder, noisy)
    found = words(folder)
    assert found.headline.startswith("No winner: no scheme is shown to reach a lower validation loss than pre at 98.3k")
    # For each scheme what its own seeds could have shown.
    (peri,) = (line for line in found.findings if line.startswith("peri: no difference to pre shown"))
    own = load_results(folder).scheme_result("peri")
    assert own is not None
    assert own.detectable is not None
    assert f"spans zero; a true difference of {own.detectable:.3f} would be shown four times out of five." in peri


def test_no_winner_is_named_before_the_planned_seeds_have_ended(folder: Path) -> None:
    about = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps(about | {"seeds": 5}))
    assert words(folder).headline.startswith("No winner yet. Not ended: 3 of 5 seeds.")
    (folder / "compare.json").write_text(json.dumps(about))
    rewrite(folder, lambda row: None if row["scheme"] in ("peri", "geonorm") and row["seed"] == 2 else row)
    assert words(folder).headline.startswith("No winner yet. Not ended: 2 of 3 seeds of peri and geonorm.")


def test_no_winner_is_named_while_a_rate_is_searched_for(folder: Path) -> None:
    about = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps(about | {"lrs": [*about["lrs"], 2.4e-3]}))
    assert words(folder).headline.startswith(
        "No winner yet. Not ended: the search for the rate of pre, post, peri and geonorm."
    )
    widened = {"lrs": about["lrs"], "widen_rates": True}
    (folder / "compare.json").write_text(json.dumps(about | widened))
    assert "Not ended: the search for the rate of" in words(folder).headline
    search = {"lrs": "auto", "rates": {"first": [5e-4, 1e-3, 2e-3], "limits": [6.25e-5, 1.6e-2]}}
    (folder / "compare.json").write_text(json.dumps(about | search))
    assert "Not ended: the search for the rate of" in words(folder).headline

    def searched(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"lr": 1e-3 if row["lr"] == 1.2e-3 else 5e-4}

    rewrite(folder, searched)
    for at, lr in enumerate((2e-3, 7.07e-4, 1.41e-3)):
        assert "Not ended" in words(folder).headline
        for row in [row for row in Store(folder).rows() if row["role"] == "tune" and row["lr"] == 5e-4]:
            Store(folder).append(row | {"run": f"{row['run']}-{at}", "lr": lr})
    assert words(folder).headline.startswith("peri reaches the lowest validation loss")


def test_better_than_the_baseline_is_not_yet_best(folder: Path) -> None:
    def alike(row: dict[str, Any]) -> dict[str, Any]:
        if row["scheme"] != "geonorm" or row["value"] is None:
            return row
        return row | {"value": synthetic._final_loss("peri", row["lr"], row["seed"]) + 0.003 * (-1) ** row["seed"]}

    rewrite(folder, alike)
    assert "which of them is best is not shown" in words(folder).headline


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_a_winner_over_others_than_the_baseline_says_so(folder: Path, trained: int) -> None:
    """With a baseline that did not train it was called the baseline itself, or had an interval "– to –"."""
    seeds = sorted({row["seed"] for row in Store(folder).rows() if row["role"] == "judge"})

    def lost(row: dict[str, Any]) -> dict[str, Any]:
        if row["scheme"] != "pre" or row["role"] != "judge":
            return row
        # The baseline's first seed scatters so much that two pairs show nothing.
        far = 1.0 if row["seed"] == seeds[0] else 0.0
        return row | {"stuck": row["seed"] in seeds[trained:], "value": row["value"] + far}

    rewrite(folder, lost)
    assert words(folder).headline.startswith(
        "peri reaches a lower validation loss than geonorm at 98.3k tokens a run; that it is better than pre is not "
        "shown. pre was stuck with"
    )


def test_rows_of_two_comparisons_in_one_file_are_noticed(folder: Path) -> None:
    rows = Store(folder).rows()
    twin = next(row for row in rows if row["scheme"] == "peri" and row["role"] == "judge")
    Store(folder).append(twin | {"run": "of-another", "value": 9.0})
    (line,) = (line for line in words(folder).cautions if "the last one counts" in line)
    assert line == f"peri: 2 runs have seed {twin['seed']} at the rate 1.2e-3; the last one counts."
    Store(folder).append(twin | {"run": "of-encoders", "metric": "val_masked_loss"})
    expected = "No verdict: rows have several metrics, val_loss and val_masked_loss."
    assert words(folder).headline == expected


def test_settings_that_differ_between_rows_are_named(folder: Path) -> None:
    """Rows of two comparisons that were put into one file; what runs of one differ in is no setting."""
    assert not any("different settings" in line for line in words(folder).cautions)

    def other(row: dict[str, Any]) -> dict[str, Any]:
        long = row["config"] | {"length": 256, "data": ["a"], "branches": [10]}
        return row | {"config": long} if row["scheme"] == "peri" else row

    rewrite(folder, lambda row: row | {"config": row["config"] | {"length": 128, "data": ["x" * 50]}})
    rewrite(folder, other)
    line = "The rows have different settings: data and length (128 and 256). What differs may be due to them."
    assert line in words(folder).cautions


def test_the_baseline_may_win(folder: Path) -> None:
    about = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps(about | {"baseline": "peri"}))
    found = words(folder)
    assert found.headline.startswith("peri, the baseline, reaches the lowest validation loss")
    assert any(line.startswith("pre is worse") for line in found.findings)


@pytest.mark.parametrize(
    ("keep", "headline"),
    [
        (lambda row: row["role"] == "tune", "No verdict: no scheme has a finished judge run at its picked rate."),
        (lambda row: row["seed"] in (1, *synthetic.TUNE), "No winner: one seed for each scheme shows no difference."),
        (lambda row: row["scheme"] == "pre", "No verdict: there is nothing to compare yet."),
        (lambda row: row["scheme"] == "peri", "No verdict: unknown baseline 'pre'"),
        (lambda row: False, "No verdict: no run has ended yet."),
    ],
)  # fmt: skip
def test_no_claim_without_grounds(folder: Path, keep: Any, headline: str) -> None:
    rewrite(folder, lambda row: row if keep(row) else None)
    assert words(folder).headline.startswith(headline)


def test_cautions_name_the_edge_of_the_grid_and_what_is_still_running(tmp_path: Path) -> None:
    found = words(synthetic.comparison(tmp_path / "c", hostile=False, steps=24, running=True))
    assert any("is the largest tried (1.2e-3)" in line for line in found.cautions)
    assert any(line.startswith("1 of 37 runs has not ended") for line in found.cautions)


def test_a_ranking_at_the_edge_of_the_grid_says_so_in_its_headline(folder: Path) -> None:
    brief = "Rates are not bracketed: the best is the largest tried for peri, geonorm, pre and post."
    assert words(folder).headline.endswith(brief)

    def wider(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"lr": 2.4e-3, "value": 5.0} if row["role"] == "tune" and row["lr"] == 6e-4 else row

    # With the worse rate above the better one in place of below it: smallest, not largest.
    rewrite(folder, wider)
    assert words(folder).headline.endswith("the best is the smallest tried for peri, geonorm, pre and post.")
    rows = Store(folder).rows()
    lower = [row | {"run": f"{row['run']}-low", "lr": 3e-4, "value": 5.0} for row in rows if row["role"] == "tune"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *lower]))
    found = words(folder)
    assert found.headline.endswith("rate 1.2e-3).")
    assert not any("tried" in line for line in found.cautions)


def test_an_order_that_another_rate_turns_is_named(folder: Path) -> None:
    assert not any("depends on the rate" in line for line in words(folder).cautions)

    def turned(row: dict[str, Any]) -> dict[str, Any]:
        low = row["role"] == "tune" and row["lr"] == 6e-4 and row["scheme"] == "geonorm"
        return row | {"value": row["value"] + 0.108} if low else row

    rewrite(folder, turned)
    (line,) = (line for line in words(folder).cautions if "depends on the rate" in line)
    assert line.startswith("geonorm is below pre at the picked rates (1.2e-3 and 1.2e-3), but 0.08")
    assert "above it where both have 6e-4 (3 tuning seeds)" in line


def test_stuck_runs_are_counted_named_in_the_headline_and_claim_nothing(folder: Path) -> None:
    def stuck(row: dict[str, Any]) -> dict[str, Any]:
        chosen = row["scheme"] == "peri" and (row["role"], row["seed"]) == ("judge", 2)
        tuned = row["scheme"] == "geonorm" and row["lr"] == 6e-4
        return row | {"value": 6.958, "stuck": True} if chosen or tuned else row | {"stuck": False}

    rewrite(folder, stuck)
    found = words(folder)
    assert "peri was stuck with 1 of 3 judging seeds." in found.headline
    assert found.headline.startswith("geonorm reaches the lowest validation loss")
    (claim,) = (line for line in found.findings if line.startswith("peri: 0.0"))
    assert claim.endswith("where both trained (2 seeds), but of 3 judge runs 1 stuck: no claim.")
    assert any(line.startswith("peri: 1 of 9 runs stuck (rate 1.2e-3)") for line in found.findings)
    assert any(line.startswith("geonorm: 3 of 9 runs stuck (rate 6e-4)") for line in found.findings)


def test_a_run_that_was_stopped_early_is_stuck_and_not_failed(folder: Path) -> None:
    stopped = {"state": "failed", "reason": "stuck; stopped early", "value": None, "stuck": True}
    rewrite(folder, lambda row: row | stopped if (row["scheme"], row["role"]) == ("peri", "judge") else row)
    found = words(folder)
    assert "peri was stuck with all 3 judging seeds." in found.headline
    assert "peri did not train at its rate (1.2e-3): it ended early." in found.findings
    assert not any("peri" in line and "failed" in line for line in found.findings)


def test_a_scheme_that_never_trains_is_said_to_be_stuck(folder: Path) -> None:
    def stuck(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"value": 6.97 - 10 * row["lr"], "stuck": True} if row["scheme"] == "peri" else row

    rewrite(folder, stuck)
    found = words(folder)
    assert "peri was stuck with all 3 judging seeds." in found.headline
    assert "peri did not train at its rate (1.2e-3): it ended at 6.958." in found.findings
    assert any("9 of 9 runs stuck (rate 6e-4 and 1.2e-3)" in line for line in found.findings)


def test_a_run_that_recovered_is_not_said_to_have_learnt_nothing(folder: Path) -> None:
    late = {"stuck": True, "stuck_at": 12, "steps": 24, "unigram_entropy": 6.9}
    rewrite(folder, lambda row: row | late if (row["scheme"], row["role"]) == ("peri", "judge") else row)
    found = words(folder)
    assert "peri was stuck with all 3 judging seeds." in found.headline
    (line,) = (line for line in found.findings if line.startswith("peri was stuck at its rate"))
    assert "(1.2e-3) and recovered too late: it ended at 4." in line
    (line,) = (line for line in found.findings if "runs stuck" in line)
    assert "or at the end (3 runs recovered later)." in line


def test_interrupted_runs_are_named_and_charged_to_nobody(folder: Path) -> None:
    killed = {"state": "interrupted", "value": None, "reason": "killed"}
    rewrite(folder, lambda row: row | killed if (row["scheme"], row["seed"]) == ("peri", 3) else row)
    found = words(folder)
    assert "1 of 36 runs interrupted (peri; killed): it is part of nothing here." in found.cautions
    own = load_results(folder).scheme_result("peri")
    assert own is not None
    # Two pairs are left, too few to show anything; unreliable it is not.
    assert (own.verdict, len(own.values), own.interrupted) == ("no difference shown", 2, 1)
    assert not any("peri" in line and "failed" in line for line in found.findings)


def test_the_note_says_what_the_intervals_promise(folder: Path) -> None:
    note = level_note(load_results(folder))
    assert "3 comparisons (each at 98.33 %)" in note
    assert "together with 95 %" in note


@pytest.mark.parametrize(
    ("state", "start"),
    [
        ("done", "peri finished: validation loss 4."),
        ("running", "peri is running"),
        ("stopped", "peri was stopped"),
        ("failed", "peri failed: the loss is not finite <i>, step 60, layer layers.7.mlp."),
    ],
)
def test_a_single_run_tells_its_state(tmp_path: Path, state: str, start: str) -> None:
    assert words(synthetic.run(tmp_path / "r", state=state)).headline.startswith(start)


def test_seeds_without_scatter_are_said_to_show_nothing(folder: Path) -> None:
    def same(row: dict[str, Any]) -> dict[str, Any]:
        ended = {"pre": 4.25, "peri": 4.125}.get(row["scheme"])
        return row | {"value": ended} if ended and row["role"] == "judge" else row

    rewrite(folder, same)
    assert (
        "peri: 0.125 below pre with each of 3 seeds: no scatter, so no interval and no claim." in words(folder).findings
    )


@pytest.mark.parametrize(
    ("at", "start"),
    [
        (120, "peri is stuck: validation loss 4."),
        (60, "peri was stuck and recovered: validation loss 4."),
    ],
)
def test_a_finished_run_that_is_marked_as_stuck_is_called_so(tmp_path: Path, at: int, start: str) -> None:
    """A run alone has no row: status.json has the mark."""
    folder = synthetic.run(tmp_path / "r")
    status = json.loads((folder / "status.json").read_text())
    result = {"stuck": True, "stuck_at": at, "unigram_entropy": 3.2}
    (folder / "status.json").write_text(json.dumps(status | {"result": result}))
    assert words(folder).headline.startswith(start)
