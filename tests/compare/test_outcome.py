"""How `normlab compare` ends: its exit code, and what stands last on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normlab.cli import main
from normlab.compare import executor
from normlab.compare.outcome import Outcome, outcome
from normlab.compare.store import Store
from tests.compare import small
from tests.compare.here import Here
from tests.compare.test_store import row as stored

SMALL = {
    "dim": 16, "heads": 2, "tokens": 768, "length": 32, "batch": 4, "seeds": 1, "eval-tokens": 300,
    "device": "cpu", "workers": 1, "saves": 0, "evals": 1,
}  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, text: Path, out: Path, *words: str) -> int:
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    data = ["--data", str(text), "--val-data", str(small.held_out(text))]
    monkeypatch.setattr("sys.argv", ["normlab", "compare", *data, "--out", str(out), *flags, *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


@pytest.mark.full
def test_it_ends_well_with_the_table_and_the_headline(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--schemes", "pre", "post", "--lrs", "1e-2", "--depth", "1"]
    assert call(monkeypatch, text, tmp_path / "c", *words) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == f"page: {tmp_path / 'c' / 'report.html'}"
    assert lines[1].startswith("Scheme")
    assert lines[-1] == "No winner: one seed for each scheme shows no difference."


def test_failed_runs_make_the_exit_code_1(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor, "ProcessPool", Here)
    wild = ["--schemes", "none", "--depth", "12", "--lrs", "100", "--trouble", "stop", "--clip", "inf", "--warmup", "0"]
    assert call(monkeypatch, text, tmp_path / "c", *wild) == 1
    assert capsys.readouterr().out.splitlines()[0] == "one run failed; --repeat-failed tries again"


def test_stopped_before_its_end_the_exit_code_is_130(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--schemes", "pre", "--depth", "1", "--minutes", "1e-9"]
    assert call(monkeypatch, text, tmp_path / "c", *words) == 130
    # Rates are searched: nobody can know yet how many runs it takes.
    assert capsys.readouterr().out.splitlines()[0] == "at least 4 runs left: the same command goes on"


@pytest.mark.parametrize(
    ("facts", "code"),
    [((0, 0, False, 0, 0), 0), ((0, 0, False, 2, 0), 1), ((0, 1, False, 0, 1), 1), ((3, 4, True, 1, 1), 130)],
)
def test_exit_codes(facts: tuple[Any, ...], code: int) -> None:
    assert Outcome(*facts).exit_code == code


@pytest.mark.parametrize(("survivors", "stuck", "failed"), [(True, False, 0), (False, False, 9), (False, True, 0)])
def test_a_search_may_meet_rates_that_fail(tmp_path: Path, survivors: bool, stuck: bool, failed: int) -> None:
    config = small.configuration("text", lrs="auto", schemes=("pre",), seeds=1)
    plan, store = config.plan(), Store(tmp_path)
    while due := plan.runnable(store.rows()):
        run = due[0]
        value = 3.0 if survivors and run.config.lr < 1e-2 else None
        ended = {"state": "done", "reason": None} if value else {"state": "failed", "reason": "loss is nan"}
        place = {"run": run.name, "scheme": "pre", "lr": run.config.lr, "seed": run.config.seed, "role": run.role}
        store.append(stored() | place | ended | {"value": value, "loss": value, "stuck": stuck and value is None})
    found = outcome(config, tmp_path)
    assert (found.failed, found.runnable, found.left) == (failed, 0, 0)
    assert found.exit_code == (1 if failed else 0)
