"""Checks, simulations and benchmarks of a study: stored whole, tried again after an error, with the reason named."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.compare import store as storing
from normlab.errors import NormLabError
from normlab.studies import run as running
from normlab.studies.evidence import Evidence
from normlab.studies.items import Item, _check_seeds, run_item
from normlab.studies.judge import judge_claims
from normlab.studies.record import StudyRecord
from normlab.studies.run import run_study
from normlab.studies.study import Study
from normlab.utils.locks import hold
from tests.studies.rows import other

RULE = 'kind = "bound"\nscheme = "geonorm"\nvalue = "speed"\nat_least = 0.5\nexact = true'


def study() -> Study:
    return other("bench", "", RULE)


def measured() -> list[dict]:
    return [{"scheme": name, "speed": 0.9} for name in ("pre", "geonorm")]


def broken() -> list[dict]:
    raise RuntimeError("no kernel image\nfor this device")


def working_with(monkeypatch: pytest.MonkeyPatch, **calls) -> None:
    work = [Item(f"main/{name}", "main", name, 0, call) for name, call in calls.items()]
    monkeypatch.setattr(running, "study_items", lambda _: work)


def stored(folder: Path) -> list[dict]:
    return StudyRecord(study(), folder / "other").rows().get("main", [])


def test_rows_of_an_item_are_stored_together(tmp_path, monkeypatch):
    """A kill between two writes would leave half an item, which counts as done."""
    whole, writes = storing._write, []

    def once(file: int, line: bytes) -> None:
        writes.append(line)
        if len(writes) > 1:
            raise KeyboardInterrupt
        whole(file, line)

    monkeypatch.setattr(storing, "_write", once)
    working_with(monkeypatch, bench=measured)
    assert run_study(study(), tmp_path, progress=False) == 0
    assert [row["scheme"] for row in stored(tmp_path)] == ["pre", "geonorm"]


def test_the_work_is_counted_before_it_begins(tmp_path, monkeypatch):
    seen = []

    def call() -> list[dict]:
        seen.append(StudyRecord(study(), tmp_path / "other").about)
        return measured()

    working_with(monkeypatch, one=call, two=call)
    assert run_study(study(), tmp_path, progress=False) == 0
    assert [(about["runs"], about["left"]) for about in seen] == [(2, 2), (2, 2)]
    assert StudyRecord(study(), tmp_path / "other").about["left"] == 0


def test_a_folder_is_worked_in_by_one_process(tmp_path, monkeypatch):
    working_with(monkeypatch, bench=measured)
    (tmp_path / "other").mkdir()
    with hold(tmp_path / "other" / "lock"), pytest.raises(NormLabError, match="is in use"):
        run_study(study(), tmp_path, progress=False)


def test_an_item_that_failed_is_tried_again_and_named_until_then(tmp_path, monkeypatch):
    working_with(monkeypatch, bench=broken)
    assert run_study(study(), tmp_path, progress=False) == 0
    found = judge_claims(study(), tmp_path)["it"]
    assert found.verdict == "open"
    assert "geonorm has no runs: bench failed (RuntimeError: no kernel image)" in found.notes
    working_with(monkeypatch, bench=measured)
    assert run_study(study(), tmp_path, progress=False) == 0
    # The error is no result: nothing is left of it.
    assert [row["scheme"] for row in stored(tmp_path)] == ["pre", "geonorm"]
    assert judge_claims(study(), tmp_path)["it"].verdict == "reproduced"
    working_with(monkeypatch, bench=broken)
    assert run_study(study(), tmp_path, progress=False) == 0
    assert judge_claims(study(), tmp_path)["it"].verdict == "reproduced"


def test_work_that_failed_waits_for_work_that_was_not_tried(tmp_path, monkeypatch):
    order = []
    working_with(monkeypatch, one=broken)
    run_study(study(), tmp_path, progress=False)
    working_with(monkeypatch, one=lambda: order.append("one") or measured(),
                 two=lambda: order.append("two") or measured())  # fmt: skip
    assert run_study(study(), tmp_path, progress=False) == 0
    assert order == ["two", "one"]


def test_a_check_that_broke_has_no_profile_after_it():
    def profile(seed: int, step: int) -> dict:
        return {"seed": seed, "step": step, "boundaries": 3, "rms": [1.0, 1.0, float(step)]}

    profiles = [profile(0, 0), profile(0, 5), profile(1, 0)]
    found = {"ladder": {"profiles": profiles}, "verdicts": [], "theory": {}}
    item = Item("main/pre", "main", "pre", 0, lambda: [{"scheme": "pre", **row} for row in _check_seeds(found)])
    sound, failed = run_item(item)
    assert (sound["state"], sound["after"]["step"], sound["reason"]) == ("done", 5, None)
    assert (failed["state"], failed["before"]["step"], failed["after"]) == ("failed", 0, None)
    assert "first step" in failed["reason"]


def test_the_result_of_a_check_is_one_observation():
    """Its theory is measured with the first seed alone."""
    profiles = [{"seed": seed, "step": step, "boundaries": 3} for seed in range(3) for step in (0, 5)]
    found = {"ladder": {"profiles": profiles}, "theory": {"after": {"log_gain": 2.0}}}
    rows = [{"scheme": "pre", "state": "done", **row} for row in _check_seeds(found)]
    assert ["result" in row for row in rows] == [True, False, False]
    own = Evidence({"main": rows}).sample("pre", "main", "result.theory.after.log_gain")
    assert (own.values, own.problems) == ({(0, 0): 2.0}, [])
    assert len(Evidence({"main": rows}).sample("pre", "main", "after.step").values) == 3
