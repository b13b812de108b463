"""Stored scores: what an edited file holds is said in one line."""

from __future__ import annotations

import json

import pytest

from normlab import NormLabError
from normlab.evaluation.score import Score
from normlab.evaluation.store import Store

GOOD = {"key": "k", "run": "runs/pre", "settings": {}, "scores": [{"task": "t", "metric": "acc", "value": 0.5}]}


def test_what_was_stored_is_read(tmp_path):
    score = Score(task="t", metric="acc", value=float("nan"), stderr=None, samples=None)
    row = Store(tmp_path / "e.json").add("k", [score], run="runs/pre", settings={"limit": None})
    assert json.dumps(Store(tmp_path / "e.json").rows) == json.dumps([row])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (7, "results must be a list, got 7"),
        ([GOOD, 7], "result 2: expected a table, got 7"),
        ([{"run": "runs/pre"}], r"result 1: has no valid 'key' \(None\)"),
        ([GOOD | {"settings": None}], "result 1: has no valid 'settings'"),
        ([GOOD | {"scores": [7]}], "result 1: a score must be a table, got 7"),
        ([GOOD | {"scores": [{"task": "t", "metric": "acc", "value": "x"}]}], "a score has no valid 'value'"),
    ],
    ids=str,
)
def test_a_broken_file_gets_one_line(results, message, tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"normlab_evaluation": 1, "results": results}))
    with pytest.raises(NormLabError, match=message) as caught:
        Store(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
