"""The grid benchmark at tiny sizes on a CPU: what is measured, what follows from it, what is refused."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from normlab import NormLabError
from normlab.bench import run
from normlab.bench.grid import GridRow, parse_size, share_goal, verdicts
from normlab.bench.grid_worker import GridWorker, PlainLoop, Shape
from normlab.bench.remote import Local, Remote
from normlab.bench.synthetic import synthetic_corpus
from normlab.train import model_cache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are the rules for machines without a GPU")

TINY = {"batch": 2, "length": 16, "vocabulary": 64}


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(model_cache, "_cache", None)


def row(**changes) -> GridRow:
    """A step of 1e12 FLOPs on a GPU of 1e14 FLOP/s."""
    known = {
        "plain": 20.0, "plain_start": 20.0, "without_graphs": 40.0, "at_once": {1: 50.0, 2: 60.0, 3: 54.0},
        "replay_seconds": 0.015, "overhead": 4.0,
    }  # fmt: skip
    return GridRow("4x256", 256, 16_384, 1e12, 1e14, **(known | changes))


def test_a_grid_from_beginning_to_end(uncompiled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["normlab", "bench", "grid", "--cpu", "--out", "somewhere"])
    out = tmp_path / "grid.json"
    options = {"cpu": True, "out": out, "seconds": 0.02, "processes": False, **TINY}
    found = run.grid(["1x16", "2x16"], at_once=[2], **options)
    kept = json.loads(out.read_text())
    assert (kept["command"], kept["complete"]) == ("normlab bench grid --cpu", True)
    assert [one["size"] for one in kept["rows"]] == ["1x16", "2x16"]
    for one in found:
        # One run alone is always measured: it is what sharing is compared with.
        assert list(one["at_once"]) == [1, 2]
        speeds = [one["plain"], one["without_graphs"], *one["at_once"].values(), one["overhead"], one["plain_start"]]
        assert all(math.isfinite(speed) and speed > 0 for speed in speeds)
        assert one["replay_seconds"] is None
    assert list(found[0]["in_one_process"]) == [2]
    shown = capsys.readouterr()
    assert "2 at once" in shown.out
    assert shown.out.count("reached:") == 4
    assert "2x16 timed" in shown.err


def test_on_a_cpu_what_is_not_given_is_tiny(uncompiled, capsys):
    """Sizes of a GPU are too large to show on a CPU what is printed."""
    found = run.grid(cpu=True, quick=True, seconds=0.02, processes=False)
    assert [(one["size"], one["tokens_a_step"], list(one["at_once"])) for one in found] == [
        ("1x16", 32, [1, 2]), ("2x32", 32, [1, 2]),
    ]  # fmt: skip
    assert "1x16 timed" in capsys.readouterr().err


def test_what_follows_from_the_figures():
    one = row()
    assert one.best == (2, 60.0)
    assert one.share(60.0) == pytest.approx(0.6)
    steps = math.ceil(29.5e6 / 16_384)
    # Two runs at a time, each at half the rate of both; the plain loop makes one after the other.
    assert one.runs_an_hour() == pytest.approx(2 * 3600 / (4.0 + steps / 30.0))
    assert one.plain_runs_an_hour() == pytest.approx(3600 / (20.0 + steps / 20.0))
    assert one.bounds == pytest.approx({"launches": 5.0, "host": 5.0, "kernels": 15.0})
    assert sum(one.bounds.values()) == pytest.approx(1e3 / one.without_graphs)


def test_goals():
    assert [share_goal(width) for width in (256, 384, 512, 640)] == [0.25, 0.25, 0.45, 0.45]
    lines = verdicts([row().to_dict(), row(at_once={1: 10.0}, overhead=6.0).to_dict()])
    assert lines[0] == "reached:     4x256: 60.0% of the ceiling (goal 25%)"
    assert lines[1] == "not reached: 4x256: 10.0% of the ceiling (goal 25%)"
    assert lines[2] == "not reached: a run of a known shape takes at most 6.0 s beside its steps (goal 5 s)"
    # 2 · 3600 / (4 + 1801 / 30) runs an hour against 3600 / (20 + 1801 / 20).
    assert lines[3] == "reached:     4x256: 3.44 × the runs an hour of the plain loop (goal 3)"


def test_the_steps_that_are_timed_are_those_of_a_run(uncompiled):
    shape = Shape(1, 16, vocabulary=64, length=16, batch=2, device="cpu")
    worker = GridWorker([shape])
    worker.prepare([shape], 2)
    first, second = worker._runs[shape]
    before = (first.trainer.step, second.trainer.step)
    assert worker.time(shape, 0.01, 2) > 0
    assert first.trainer.step - before[0] == second.trainer.step - before[1] > 0
    assert first.trainer.config.seed != second.trainer.config.seed
    worker.close()
    loop = PlainLoop(shape)
    assert loop.start() > 0
    assert loop.time(0.01) > 0


def test_synthetic_text_is_as_frequent_as_a_language():
    corpus = synthetic_corpus(64, 20_000)
    ids = corpus.train.ids[:-1]
    assert (corpus.train.n_tokens, corpus.val.n_tokens, len(ids)) == (18_000, 2_000, 20_000)
    shares = [(ids == token).mean() for token in (0, 1, 9)]
    whole = sum(1 / k for k in range(1, 65))
    # Four standard errors of a share.
    for share, k in zip(shares, (1, 2, 10), strict=True):
        expected = 1 / k / whole
        assert abs(share - expected) < 4 * math.sqrt(expected / 20_000)


class Counter:
    """What a process holds in the test of processes."""

    def __init__(self, start: int):
        self.value = start

    def add(self, more: int) -> int:
        self.value += more
        return self.value

    def close(self) -> None: ...

    def fail(self) -> None:
        raise ValueError("on purpose\nwith details")


@pytest.mark.parametrize("kind", [Local, pytest.param(Remote, marks=pytest.mark.full)])
def test_an_object_here_or_in_a_process(kind):
    counter = kind(Counter, 3)
    assert counter.call("add", 4) == 7
    assert counter.ask("add", 1).answer() == 8
    assert counter.start_seconds >= 0.0
    counter.end()


@pytest.mark.full
def test_a_failure_in_a_process_is_one_line():
    counter = Remote(Counter, 3)
    with pytest.raises(NormLabError, match="failed: ValueError: on purpose"):
        counter.call("fail")
    counter.end()


def test_bad_input_gets_one_clear_line():
    with pytest.raises(NormLabError, match="no GPU here: bench grid needs one"):
        run.grid()
    with pytest.raises(NormLabError, match="'4by256' is not a size; expected depth x width"):
        run.grid(["4by256"], cpu=True)
    with pytest.raises(NormLabError, match="at_once must be at least 1, got 0"):
        run.grid(["1x16"], at_once=[0], cpu=True)
    for name in ("batch", "length", "vocabulary"):
        with pytest.raises(NormLabError, match=f"{name} must be at least 1, got 0; leave it out"):
            run.grid(cpu=True, **{name: 0})
    assert parse_size("4×256") == (4, 256)
