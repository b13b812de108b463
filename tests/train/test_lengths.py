"""benchmarks/lengths.py: on a rented GPU a fault must be found before the first of its runs is trained."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from normlab import NormLabError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lengths.py"
SPEC = importlib.util.spec_from_file_location("lengths", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
lengths = importlib.util.module_from_spec(SPEC)
# Dataclasses look their module up.
sys.modules["lengths"] = lengths
SPEC.loader.exec_module(lengths)


def arguments(**changes: Any) -> Any:
    small = {"short": 8, "long": 32, "tokens_a_step": 64, "eval_tokens": 128, "depth": 1, "dim": 8, "heads": 1}
    return lengths.Arguments(**(small | {"steps": 1, "seeds": 1} | changes))


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Scheme and length of every run, in place of training it."""
    runs: list[tuple[str, int]] = []

    def note(config: Any, _data: Any, length: int, _built: Any) -> dict[str, Any]:
        runs.append((config.model.scheme_object.label, length))
        return {"loss": 1.0}

    monkeypatch.setattr(lengths, "_train", note)
    return runs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"short": 6}, "short must be 4 or more and divide long"),
        ({"tokens_a_step": 100}, "long tokens_a_step"),
        ({"eval_tokens": 32}, "eval_tokens must be a whole step, 64"),
        ({"schemes": ("pre", "geonrm")}, "did you mean 'geonorm'"),
        ({"val_data": ("none.jsonl.xz",)}, "no file matches 'none.jsonl.xz'"),
        ({"tokenizer": "none.json"}, "tokenizer none.json: cannot be read"),
        ({"device": "cuda:99"}, "GPU"),
        ({"out": Path("/nowhere/lengths.json")}, "cannot write /nowhere/lengths.json"),
    ],
)
def test_faults_are_found_before_anything_is_trained(changes, words, tmp_path, untrained):
    with pytest.raises(NormLabError) as error:
        lengths.main(arguments(**({"out": tmp_path / "lengths.json"} | changes)))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert untrained == []


def test_every_treatment_has_the_runs_of_every_scheme(tmp_path, untrained, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    lengths.main(arguments(out=tmp_path / "lengths.json", data=(str(text),)))
    assert untrained == [(scheme, length) for length in (8, 32, 8) for scheme in ("pre", "geonorm")]
    rows = json.loads((tmp_path / "lengths.json").read_text())["rows"]
    assert [row["treatment"] for row in rows] == ["short"] * 2 + ["long"] * 2 + ["cut"] * 2
