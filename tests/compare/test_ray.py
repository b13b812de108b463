"""The same runs on a local Ray: the same numbers, stopped and resumed; and one line where Ray is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from normlab.compare import compare
from normlab.compare.ray_pool import RayPool, _perform, _Task
from normlab.compare.run_one import Job
from normlab.compare.store import Store
from normlab.errors import NormLabError
from tests.compare import small
from tests.compare.small import configuration, has_checkpoint, in_process, losses, values, wait_until


@pytest.fixture(autouse=True)
def _a_ray_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an address Ray joins whatever cluster runs on this machine, another test's too, and goes down with it.
    monkeypatch.setenv("RAY_ADDRESS", "local")


# Each process of Ray's imports torch before it does anything, which takes a minute on a busy machine: the limits below
# end a hang, they measure nothing.
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra cluster)")


@needs_ray
@pytest.mark.full
def test_ray_gives_the_numbers_of_this_machine_and_finds_a_scheme_in_a_file(
    whole: Path, text: Path, tmp_path: Path
) -> None:
    own = Path(__file__).parents[2] / "examples" / "custom_scheme.py"
    config = {"on": "ray", "workers": 2, "schemes": ["pre", "post", f"{own}:Balanced(tau=0.3)"]}
    process = in_process(text, tmp_path, config, progress=False)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert values(tmp_path).items() >= values(whole).items()
    assert losses(tmp_path).items() >= losses(whole).items()
    assert {row["scheme"] for row in Store(tmp_path).rows()} == {"pre", "post", "balanced(tau=0.3)"}


@needs_ray
@pytest.mark.full
def test_asked_to_stop_runs_on_ray_save(long: Path, text: Path, tmp_path: Path) -> None:
    config = small.long(of_base={"steps": small.LONG, "saves": 0})
    process = in_process(text, tmp_path, config | {"on": "ray"}, progress=False)
    wait_until(lambda: any(losses(tmp_path).values()), process, seconds=400.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=400)
    assert values(tmp_path) == {}
    assert has_checkpoint(tmp_path)
    compare(configuration(text, **config), tmp_path, progress=False)
    assert values(tmp_path) == values(long)


@needs_ray
@pytest.mark.full
def test_a_run_that_ray_loses_is_started_again_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    # Few steps: Ray gives its processes a low priority, and other tests run beside this one.
    process = in_process(text, tmp_path, small.long(on="ray", schemes=["pre"], of_base={"steps": 60, "saves": 6}))
    wait_until(lambda: has_checkpoint(tmp_path), process, seconds=900.0)
    lock = next(tmp_path.glob("runs/*/lock"))
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert "Ray lost it" in errors
    assert [(row["state"], row["steps"]) for row in Store(tmp_path).rows()] == [("done", 60)]
    # It went on from a checkpoint: no step stands twice, and the first ones were not made again.
    (steps,) = losses(tmp_path).values()
    assert len(steps) == 60
    assert any("resume" in line for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines())


class _LostError(Exception):
    """Stands for Ray's error for a worker that died."""


class _OtherError(Exception):
    """Stands for Ray's errors that are not raised here."""


def test_what_ray_loses_is_interrupted(text: Path, tmp_path: Path) -> None:
    def get(reference: str) -> None:
        raise _LostError("The worker died unexpectedly.\nMore about it.")

    pool = RayPool.__new__(RayPool)
    errors = SimpleNamespace(TaskCancelledError=_OtherError, RayTaskError=_OtherError, RayError=_LostError)
    pool._ray, pool._stopped = cast(ModuleType, SimpleNamespace(exceptions=errors, get=get)), False
    run = configuration(text).plan().tune()[0]
    _, row = pool._ended("reference", _Task(Job(run, tmp_path / "run", ""), "2026-01-01T00:00:00+00:00"))
    assert isinstance(row, dict)
    assert (row["state"], row["reason"]) == ("interrupted", "Ray lost it: The worker died unexpectedly.")


def test_ray_that_is_missing_is_named_with_its_extra(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NormLabError, match=r'pip install "normlab\[cluster\]"'):
        compare(configuration(text, on="ray"), tmp_path, progress=False)


def test_a_machine_that_does_not_see_the_folder_says_so(text: Path, tmp_path: Path) -> None:
    run = configuration(text).plan().tune()[0]
    with pytest.raises(NormLabError, match="must share that folder"):
        _perform(Job(run, tmp_path / "nowhere" / "runs" / run.name, ""), 1)
