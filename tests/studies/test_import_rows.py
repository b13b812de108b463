"""Studies of rows: rows that were made elsewhere are taken in under the study's rule, whole or not at all."""

from __future__ import annotations

import json
import math

import pytest

from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.studies import run as running
from normlab.studies.judge import judge_claims
from normlab.studies.run import run_study
from tests.studies.rows import other, row

MORE = {"tokens": 1, "steps": 1, "seconds": 1.0, "tokens_per_s": 1.0, "peak_bytes": 1, "device": "x", "config": {}}
"""What a stored row needs beside its place and its value."""


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where these tests are a copy without .git."""
    monkeypatch.setattr("normlab.studies.preflight.is_unnamed_copy", lambda: False)


def test_rows_from_elsewhere_are_stamped_and_their_age_is_told(tmp_path):
    # A folder of that name above the source does not matter.
    source = Store(tmp_path / "runs" / "ladder" / "small")
    for scheme, value, slope in (("pre", 4.0, 0.01), ("peri", 3.0, 0.012)):
        for seed in range(3):
            source.append(row(scheme, seed, value + slope * seed, **MORE))
    rule = 'kind = "difference"\nscheme = "peri"\nagainst = "pre"'
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "runs" / "ladder"}"]')
    assert run_study(study, tmp_path / "results", progress=False) == 0
    found = judge_claims(study, tmp_path / "results")["it"]
    assert found.verdict == "reproduced"
    assert "6 rows began before the rule was registered" in found.notes
    stored = running.StudyRecord(study, tmp_path / "results/other").rows()
    assert list(stored) == ["ladder-small"]
    assert {one["rule"] for one in stored["ladder-small"]} == {study.rule_hash}


def test_a_benchmark_file_is_rows(tmp_path):
    made = {"scheme": "geonorm", "kernels": "triton", "paired": [0.99, 0.98, 0.985], "memory_over_pre": 1.01}
    (tmp_path / "step.json").write_text(json.dumps({"date": "2026-01-01", "rows": [made, made | {"kernels": "x"}]}))
    rule = 'kind = "bound"\nscheme = "geonorm"\nvalue = "paired"\nat_least = 0.95'
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "step.json"}"]')
    assert run_study(study, tmp_path / "results", progress=False) == 0
    found = judge_claims(study, tmp_path / "results")["it"]
    assert (found.verdict, found.runs, found.seeds) == ("reproduced", 3, 0)


def test_rows_that_are_not_there_are_asked_for(tmp_path):
    study = other("rows", "", 'kind = "count"\nscheme = "a"\nat_most = 0.0', head=f'rows = ["{tmp_path / "none"}"]')
    with pytest.raises(NormLabError, match="make them first"):
        run_study(study, tmp_path / "results", progress=False)


def test_rows_of_several_sources_are_taken_in_whole_or_not_at_all(tmp_path):
    sources = [tmp_path / "first/main", tmp_path / "second/arm"]
    head = f"rows = {[str(source) for source in sources]}"
    study = other("rows", "", 'kind = "count"\nscheme = "pre"\nat_most = 0.0', head=head)
    Store(sources[0]).append(row("pre", 0, 1.0, **MORE))
    with pytest.raises(NormLabError, match="make them first"):
        run_study(study, tmp_path / "results", progress=False)
    Store(sources[1]).append(row("pre", 0, 1.0, **MORE))
    about = tmp_path / "second/study.json"
    about.write_text(json.dumps({"left": 2}))
    with pytest.raises(NormLabError, match="2 runs of second have not ended"):
        run_study(study, tmp_path / "results", progress=False)
    assert running.StudyRecord(study, tmp_path / "results/other").rows() == {}
    about.write_text(json.dumps({"left": 0}))
    assert run_study(study, tmp_path / "results", progress=False) == 0


def test_rows_follow_their_source(tmp_path):
    """A run that was killed there, and ended later, stayed interrupted in the study."""
    source = Store(tmp_path / "source")
    source.append(row("pre", 0, 1.0, first_loss=math.nan, **MORE))
    source.append(row("pre", 1, 2.0, **MORE) | {"state": "interrupted"})
    rule = 'kind = "count"\nscheme = "pre"\nat_most = 0.0'
    # Named twice, it is one source.
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "source"}", "{tmp_path / "source"}/"]')
    stored = Store(tmp_path / "results/other/source")
    for state in ("interrupted", "done"):
        source.append(row("pre", 1, 2.0, **MORE) | {"state": state})
        for _ in range(2):
            assert run_study(study, tmp_path / "results", progress=False) == 0
        assert [one["state"] for one in stored.rows()] == ["done", state]
    # What has not changed is not written again, not even with a number that does not equal itself.
    assert len(stored.path.read_text().splitlines()) == 3


def test_rows_of_a_comparison_with_runs_left_are_refused(tmp_path):
    """As those of a study: intervals of a part do not hold at their level."""
    source = Store(tmp_path / "source")
    source.append(row("pre", 0, 1.0, **MORE))
    source.append(row("pre", 1, 1.0, **MORE) | {"state": "interrupted"})
    about = {"schemes": ["pre"], "lrs": [1e-3], "seeds": 2, "tune_seeds": 1, "baseline": "pre"}
    (tmp_path / "source/compare.json").write_text(json.dumps(about))
    rule = 'kind = "count"\nscheme = "pre"\nat_most = 0.0'
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "source"}"]')
    with pytest.raises(NormLabError, match=r"has runs left \(not ended: 1 of 2 seeds\); end it first"):
        run_study(study, tmp_path / "results", progress=False)
    assert running.StudyRecord(study, tmp_path / "results/other").rows() == {}
    source.append(row("pre", 1, 1.0, **MORE))
    assert run_study(study, tmp_path / "results", progress=False) == 0


def test_settings_that_differ_between_sources_are_named(tmp_path):
    """And those that differ within one, as where rows of two comparisons are in one file."""
    model = {"depth": 2, "scheme": "pre"}
    for name, length, batches in (("short", 32, (4, 4)), ("long", 64, (4, 8))):
        for seed, batch in enumerate(batches):
            config = {"model": model, "length": length, "batch": batch, "seed": seed}
            Store(tmp_path / name).append(row("pre", seed, 1.0, **MORE | {"config": config}))
    rule = 'kind = "count"\nscheme = "pre"\nat_most = 0.0'
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "short"}", "{tmp_path / "long"}"]')
    run_study(study, tmp_path / "results", progress=False)
    notes = judge_claims(study, tmp_path / "results")["it"].notes
    assert "long: the rows differ in batch (4 and 8)" in notes
    assert "the sources of the rows differ in length (64 and 32) and batch (4 and 8)" in notes
    assert not any(note.startswith("short") for note in notes)


def test_rows_of_a_ladder_with_runs_left_are_refused(tmp_path):
    """As those of a comparison; ladder.json is written anew when the last run has ended."""
    source = Store(tmp_path / "source")
    source.append(row("pre", 0, 1.0, **MORE))
    about = {"config": {"baseline": "pre", "level": 0.95}, "targets": []}
    rule = 'kind = "count"\nscheme = "pre"\nat_most = 0.0'
    study = other("rows", "", rule, head=f'rows = ["{tmp_path / "source"}"]')
    (tmp_path / "source/ladder.json").write_text(json.dumps({**about, "design": {"runs_left": 2}}))
    with pytest.raises(NormLabError, match="a ladder that has at least 2 runs left; end it first") as caught:
        run_study(study, tmp_path / "results", progress=False)
    assert "\n" not in str(caught.value)
    assert running.StudyRecord(study, tmp_path / "results/other").rows() == {}
    (tmp_path / "source/ladder.json").write_text(json.dumps({**about, "design": {"runs_left": 0}}))
    assert run_study(study, tmp_path / "results", progress=False) == 0


def test_two_sources_do_not_make_one_arm(tmp_path):
    """Runs of one name were dropped, and others mixed with those of another experiment."""
    places = [tmp_path / "books/main", tmp_path / "science/main"]
    for seed, place in enumerate(places):
        Store(place).append(row("pre", seed, 1.0, **MORE))
    rule = 'kind = "count"\nscheme = "pre"\nat_most = 0.0'
    study = other("rows", "", rule, head=f"rows = {[str(place) for place in places]}")
    with pytest.raises(NormLabError, match=r"would both be the arm 'main'.*; name the folders above them") as caught:
        run_study(study, tmp_path / "results", progress=False)
    assert "\n" not in str(caught.value)
    assert running.StudyRecord(study, tmp_path / "results/other").rows() == {}
    above = other("rows", "", rule, head=f"rows = {[str(place.parent) for place in places]}")
    assert run_study(above, tmp_path / "above", progress=False) == 0
    assert [*running.StudyRecord(above, tmp_path / "above/other").rows()] == ["books-main", "science-main"]


def test_the_folder_of_the_command_is_an_arm_by_its_name(tmp_path, monkeypatch):
    """Rows of .. went beside the study's folder."""
    Store(tmp_path / "source").append(row("pre", 0, 1.0, **MORE))
    (tmp_path / "source" / "below").mkdir()
    for place, name in (("source", "."), ("source/below", "..")):
        monkeypatch.chdir(tmp_path / place)
        study = other("rows", "", 'kind = "count"\nscheme = "pre"\nat_most = 0.0', head=f'rows = ["{name}"]')
        assert run_study(study, tmp_path / f"results{len(name)}", progress=False) == 0
        record = running.StudyRecord(study, tmp_path / f"results{len(name)}/other")
        assert [*record.rows()] == ["source"]


def test_rows_of_folders_that_make_one_arm_are_all_taken(tmp_path):
    for seed, place in enumerate(("books/4x256", "books-4x256")):
        Store(tmp_path / "source" / place).append(row("pre", seed, 1.0, **MORE))
    head = f'rows = ["{tmp_path / "source"}"]'
    study = other("rows", "", 'kind = "count"\nscheme = "pre"\nat_most = 0.0', head=head)
    assert run_study(study, tmp_path / "results", progress=False) == 0
    (arm,) = running.StudyRecord(study, tmp_path / "results/other").rows().values()
    assert sorted(one["seed"] for one in arm) == [0, 1]
