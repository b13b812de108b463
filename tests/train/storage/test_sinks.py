"""Sinks: what is written comes back, torn lines do not, and a resumed run writes what it would have written."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest

from normlab import NormLabError
from normlab.train.storage.sinks import JsonLines, open_sinks, read_records


def step(k, **more):
    return {"kind": "step", "step": k, "loss": 1.0 / (k + 1), "mfu": None, "what": "text"} | more


def test_records_come_back_in_order(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    records = [step(0), {"kind": "profile", "step": 0, "hidden_rms": [1.0, 2.5]}, step(1, detail="ü ⊙")]
    for record in records:
        sink.write(record)
    # Before it is closed or flushed: another process looks on.
    assert read_records(sink.path) == records
    sink.close()
    sink.close()
    assert next(iter(json.loads(sink.path.read_text().splitlines()[0]))) == "kind"


def test_what_json_cannot_hold_is_null(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(step(0, loss=math.nan, nested={"a": [math.inf, (1.0, -math.inf)]}))
    sink.close()
    (found,) = read_records(sink.path)
    assert found["loss"] is None
    assert found["nested"] == {"a": [None, [1.0, None]]}
    assert "NaN" not in sink.path.read_text()


@pytest.mark.parametrize(
    "tail", [b'{"kind": "step", "st', b"\x00\x00\x00\x00", b'{"kind": "step"}', b"\xff\xfe\n", b"7\n"]
)
def test_torn_tails_are_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(step(0)).encode() + b"\n" + tail)
    assert read_records(path) == [step(0)]
    sink = JsonLines(path)
    sink.write(step(1))
    sink.close()
    assert read_records(path) == [step(0), step(1)]
    assert path.read_bytes().count(b"\n") == 2


def test_a_killed_run_continues_to_the_same_bytes(tmp_path):
    whole, killed = JsonLines(tmp_path / "whole.jsonl"), JsonLines(tmp_path / "killed.jsonl")
    for k in range(10):
        whole.write(step(k))
    for k in range(7):
        killed.write(step(k))
    killed.close()
    with killed.path.open("a") as file:
        file.write('{"kind": "st')
    resumed = JsonLines(killed.path)
    resumed.truncate_after(4)
    assert [record["step"] for record in read_records(killed.path)] == [0, 1, 2, 3, 4]
    for k in range(5, 10):
        resumed.write(step(k))
    whole.close()
    resumed.close()
    assert whole.path.read_bytes() == killed.path.read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["killed.jsonl", "whole.jsonl"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(NormLabError, match=r"metrics\.jsonl"):
        JsonLines(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_one_line():
    from pathlib import Path

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    sink = JsonLines.__new__(JsonLines)
    sink.path = Path("/dev/full")
    sink._open()
    with pytest.raises(NormLabError, match="free some space"):
        sink.write(step(0))
    # What is still buffered cannot be written either.
    with pytest.raises(OSError, match="No space"):
        sink._file.close()


# -- other people's ----------------------------------------------------------------------------------------------------


class FakeTracker(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.options, self.logged, self.finished = {}, [], False

    def init(self, **options):
        self.options = options
        return self

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_numbers_alone(tmp_path, monkeypatch, name):
    tracker = FakeTracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    lines, sink = open_sinks([name, name], tmp_path / "run-1", {"lr": math.inf})
    for s in (lines, sink):
        s.write(step(3))
        s.write({"kind": "event", "step": 3, "what": "saved"})
        s.write({"kind": "eval", "step": 3, "loss": 2.0, "tokens": 7})
        s.flush()
        s.close()
    assert tracker.options["name"] == "run-1"
    assert tracker.options["resume"] == "allow"
    assert tracker.options["config"] == {"lr": None}
    assert tracker.logged == [(3, {"step/loss": 0.25}), (3, {"eval/loss": 2.0, "eval/tokens": 7})]
    assert tracker.finished
    assert len(read_records(tmp_path / "run-1" / "metrics.jsonl")) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_its_events_back(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, sink = open_sinks(["tensorboard"], tmp_path, {"scheme": "pre"})
    lines.close()
    for k in range(3):
        sink.write(step(k))
    sink.flush()
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["step/loss"]
    assert [(event.step, event.value) for event in found.Scalars("step/loss")] == [
        (k, pytest.approx(1 / (k + 1), rel=2**-23)) for k in range(3)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for checkpoint, last in ((-1, 7), (4, 10)):
        lines, sink = open_sinks(["tensorboard"], tmp_path, {"scheme": "pre"})
        lines.close()
        sink.truncate_after(checkpoint)
        for k in range(checkpoint + 1, last):
            sink.write(step(k))
        sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("step/loss")] == list(range(10))
    assert found.Tags()["tensors"] == ["config/text_summary"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_an_absent_package_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NormLabError, match=rf'pip install "normlab\[{name}\]"'):
        open_sinks([name], tmp_path, {})


def test_an_unknown_sink_is_refused_before_anything_is_opened(tmp_path):
    with pytest.raises(NormLabError, match="did you mean 'wandb'"):
        open_sinks(["wandbb"], tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
