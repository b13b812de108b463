"""Slices of time: what runs are expected to take, and which are started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from normlab.compare import compare, comparison, executor, session
from normlab.compare.durations import RunDurations
from normlab.compare.plan import Plan
from normlab.compare.store import Store
from normlab.ladders.plan import LadderPlan
from normlab.ladders.rates import FoundRate
from normlab.ladders.run import LadderRun
from normlab.train.storage.folder import RunFolder
from tests.compare import small
from tests.compare.here import Here
from tests.ladders import small as ladders


def test_a_run_is_expected_to_take_as_long_as_the_last_of_its_kind() -> None:
    now = [0.0]
    durations = RunDurations(clock=lambda: now[0])
    pre, post = (
        next(run for run in small.configuration("text").plan().tune() if run.scheme == s) for s in ("pre", "post")
    )
    assert durations.expected(pre) == 0.0
    durations.begin(pre)
    now[0] = 20.0
    durations.end(pre, steps=small.SHORT)
    assert durations.expected(pre) == pytest.approx(22.0)
    # Until a run of its own kind has ended, that of another scheme stands in, by FLOPs.
    assert durations.expected(post) == pytest.approx(22.0, rel=0.02)
    durations.begin(post)
    now[0] = 25.0
    # Stopped half-way: a whole one takes twice as long.
    durations.end(post, steps=small.SHORT // 2)
    assert durations.expected(post) == pytest.approx(11.0)
    assert durations.expected(pre) == pytest.approx(22.0)


def test_a_run_that_goes_on_counts_the_work_of_this_call(tmp_path: Path) -> None:
    now = [0.0]
    durations = RunDurations(clock=lambda: now[0])
    run = small.configuration("text").plan().tune()[0]
    for step in (small.SHORT // 4, small.SHORT // 2):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000099.partial").mkdir()
    assert RunFolder(tmp_path).saved_step == small.SHORT // 2
    durations.begin(run, RunFolder(tmp_path).saved_step)
    now[0] = 10.0
    # The second half took ten seconds: the whole takes twenty.
    durations.end(run, steps=small.SHORT)
    assert durations.expected(run) == pytest.approx(22.0)


def test_a_long_run_is_not_judged_by_a_short_one_nor_by_another_size() -> None:
    """A short run is mostly evaluation and compilation, and a small model makes fewer FLOPs a second."""
    now = [0.0]
    durations = RunDurations(clock=lambda: now[0])
    plan = LadderPlan(ladders.configuration())
    larger, smaller = (plan.judged(rung, {"pre": FoundRate("pre", 1e-2)}) for rung in plan.config.rungs[:0:-1])
    (trunk, branch), other = larger[:2], smaller[0]

    def ends(run: LadderRun, seconds: float) -> None:
        durations.begin(run, run.first_step)
        now[0] += seconds
        durations.end(run, run.config.steps)

    ends(other, 1000.0)
    ends(trunk, 20.0)
    ends(branch, 8.0)
    ends(other, 1000.0)
    assert durations.expected(trunk) == pytest.approx(22.0)
    assert durations.expected(branch, branch.first_step) == pytest.approx(8.8)
    # From its first step a branch is more like the trunk; half of its steps take half as long.
    assert durations.expected(branch) == pytest.approx(11.0)


def test_the_time_that_the_data_take_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3600.0])
    monkeypatch.setattr(comparison, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(executor, "ProcessPool", Here)
    config = small.configuration(small.write_text(tmp_path / "text"))
    assert compare(config, tmp_path / "out", progress=False, minutes=59.0) == []


@pytest.mark.parametrize(("whole_runs", "dependents", "started"), [(True, 0, 2), (False, 0, 3), (True, 1, 1)])
def test_a_slice_starts_only_runs_that_it_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: bool, dependents: int, started: int
) -> None:
    """On a clock where every run takes 20 minutes: of three in 55 minutes, the third would end too late.

    With a dependent of each the second would, too.
    """
    monkeypatch.setattr(Plan, "dependents", lambda self, run: dependents * [run])
    text, minutes, begun = small.write_text(tmp_path / "text"), [0.0], []

    class Slow(Here):
        def start(self, job) -> None:
            begun.append(job.run.name)
            super().start(job)

        def wait(self, seconds: float):
            minutes[0] += 20.0 * bool(self.running)
            return super().wait(seconds)

    clock = SimpleNamespace(monotonic=lambda: 60.0 * minutes[0])
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(executor, "ProcessPool", Slow)
    monkeypatch.setattr(executor, "RunDurations", lambda: RunDurations(clock=clock.monotonic))
    config = small.configuration(text, whole_runs=whole_runs)
    compare(config, tmp_path / "out", progress=False, minutes=55.0)
    assert len(begun) == started
    assert len(Store(tmp_path / "out").rows()) == started
