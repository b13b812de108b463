"""`normlab ladder --dry-run`: what a ladder would cost and could show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normlab.ladders.dry_run import dry_run
from normlab.ladders.ladder import open_data
from tests.command import normlab as run_command
from tests.ladders.small import STEP, configuration


def test_a_dry_run_trains_nothing(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["ladder", "--data", str(text), "--sizes", "1x64", "2x64", "3x64", "--budgets", "5k", "10k", "--batch", "4",
             "--length", "32", "--warmup-steps", "4", "--epochs", "100", "--dry-run", "--out", str(out)]  # fmt: skip
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    assert "tokens/parameter" in done.stdout
    assert "in all at least" in done.stdout
    assert "95 % interval of every scheme's gap, at best" in done.stdout
    assert not out.exists()
    words[words.index("--epochs") :] = ["--epochs", "1000", "--tokens-per-parameter", "2", "--lrs", "1e-3", "--dry-run"]
    done = run_command(*words)
    assert "--tokens-per-parameter sets the budget of each size; --budgets 5,000, 10,000 is not used" in done.stderr
    # Nothing is searched for, so that the number of runs is known.
    assert "learning rates: one is given" in done.stdout
    assert "in all 36 runs" in done.stdout


@pytest.mark.parametrize(
    ("design", "told"),
    [
        ({}, ["3 sizes and 2 budgets, fewer than 3 of each", "compute spans a factor"]),
        ({"tokens_per_parameter": 2.0, "sizes": ("1x8", "1x16", "2x16"), "target": ("2x16:1M",)},
         ["3 rungs, fewer than 4", "2x16, 1M tokens has tokens per parameter a factor"]),
        ({"sizes": ("1x8", "1x16", "4x32"), "budgets": (10 * STEP, 20 * STEP, 40 * STEP)}, []),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_the_design_cannot_show(text: Path, design: dict[str, Any], told: list[str]) -> None:
    data, config = open_data(configuration(text, of_base={"batch": 2}, **design), progress=False)
    plan = dry_run(config, data)
    said = [line for line in plan.lines() if line.startswith("beyond the ladder not identified")]
    assert len(said) == bool(told)
    assert all(any(part in line for line in said) for part in told)
    # One budget a size has one number of tokens per parameter.
    assert not any("2 - 2" in line for line in plan.lines())
