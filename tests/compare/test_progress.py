"""What a person sees of a comparison: bars on a terminal, lines elsewhere, nothing if so asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from normlab.compare import progress as comparison_progress
from normlab.compare.plan import PlannedRun, Work
from normlab.compare.progress import ComparisonProgress
from normlab.compare.run_one import Job
from normlab.utils import progress
from tests.compare import small


@pytest.fixture
def job(tmp_path: Path) -> Job:
    run = small.configuration("text").plan().tune()[0]
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"kind": "step", "step": 6, "loss": 2.5, "tokens_per_s": 4321.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return Job(run, folder, "")


class _Named:
    """A run whose name looks like markup, which must be printed as it is."""

    def __str__(self) -> str:
        return "[red]peri, rate 0.001, seed 2 (judge)"


RUN = cast(PlannedRun, _Named())


def work(ended: int, *, is_open: bool = False) -> Work:
    """Four runs of 12 steps."""
    return Work(4, ended, 48.0, 12.0 * ended, is_open)


def row(**changes: Any) -> dict[str, Any]:
    known = {"state": "done", "value": 1.25}
    return known | {"reason": None, "loss": 1.25, "unigram_entropy": 1.3, "steps": 12} | changes


def test_lines_where_there_is_no_terminal(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    for module in (comparison_progress, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    shown = ComparisonProgress(progress=True)
    shown.update(work(1), [])
    assert capsys.readouterr().err == ""
    clock.now = 60.0
    # 12 + 6 of 48 steps are done, 6 of them in this minute: the other 30 take five.
    shown.update(work(1), [job])
    line = capsys.readouterr().err
    assert line == "1 of 4 runs have ended; 5 min left; pre, rate 0.001, seed 1000 (tune): step 6\n"
    clock.now = 120.0
    shown.update(work(1, is_open=True), [job])
    assert capsys.readouterr().err.startswith("1 of at least 4 runs have ended; at least 10 min left; ")
    shown.ended(RUN, row())
    shown.ended(RUN, row(stuck=True))
    shown.ended(RUN, row(stuck=True, stuck_at=310, steps=900))
    shown.ended(RUN, row(state="failed", value=None, reason="loss is nan"))
    shown.ended(RUN, row(state="interrupted", value=None, reason="killed"))
    shown.close()
    assert capsys.readouterr().err == (
        "[red]peri, rate 0.001, seed 2 (judge): loss 1.2500\n"
        "[red]peri, rate 0.001, seed 2 (judge): loss 1.2500, stuck at the unigram entropy (1.30)\n"
        "[red]peri, rate 0.001, seed 2 (judge): loss 1.2500, was stuck at step 310 (not 0.1 below the unigram entropy, "
        "1.30); its loss at the end is 1.25\n"
        "[red]peri, rate 0.001, seed 2 (judge): failed: loss is nan\n"
        "[red]peri, rate 0.001, seed 2 (judge): interrupted: killed\n"
    )


def test_bars_on_a_terminal(job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = ComparisonProgress(progress=True)
    shown.update(work(1), [job])
    shown.ended(RUN, row())
    shown.close()
    text = capsys.readouterr().err
    assert "1 of 4 runs" in text
    assert "step 6  loss 2.5000  4,321 tok/s" in text
    assert "[red]peri, rate 0.001" in text


def test_a_loss_that_is_not_finite_is_no_reason_to_fail(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    (job.folder / "metrics.jsonl").write_text('{"kind": "step", "step": 6, "loss": null, "tokens_per_s": null}\n')
    shown = ComparisonProgress(progress=True)
    shown.update(work(0), [job])
    shown.close()
    assert "not finite" in capsys.readouterr().err


def test_nothing_if_so_asked(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ComparisonProgress(progress=False)
    shown.update(work(1), [job])
    shown.ended(RUN, row())
    shown.close()
    assert capsys.readouterr() == ("", "")
