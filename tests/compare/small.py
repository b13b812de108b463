"""Comparisons of models so small that a run takes a second, and the same in a process that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normlab.compare import CompareConfig
from normlab.models.config import DecoderConfig
from normlab.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
SHORT, LONG = 12, 250
LENGTH, BATCH = 32, 4

_CALL = """
import json, sys
from normlab.compare import compare
from tests.compare.small import configuration

compare(configuration(sys.argv[1], **json.loads(sys.argv[3])), sys.argv[2], **json.loads(sys.argv[4]))
"""


def write_text(folder: Path) -> Path:
    """Ten documents that are alike but not the same."""
    folder.mkdir()
    for i in range(10):
        lines = (f"The {n}th line of text {i} counts {n * i} and {n + i}.\n" for n in range(60))
        (folder / f"{i}.txt").write_text("".join(lines))
    held_out(folder).write_text("UPON VERY HIGH DUNES, BRAZEN FOXES JUMP; QUACK, LAZY KIWI! " * 20)
    return folder


def held_out(text: str | Path) -> Path:
    """Text to evaluate on, of letters that training hardly has: guessing by frequency is so bad that a run of a dozen
    steps does better, and is not stuck."""
    return Path(text).with_name(f"{Path(text).name}-held-out.txt")


def base(text: str | Path, steps: int = SHORT, depth: int = 2, **changes: Any) -> TrainConfig:
    known: dict[str, Any] = {
        "model": DecoderConfig(depth=depth, dim=16, heads=2), "data": (str(text),), "val_data": (str(held_out(text)),),
        "tokens": steps * LENGTH * BATCH, "length": LENGTH, "batch": BATCH, "device": "cpu",
        "evals": 2, "eval_tokens": 600, "saves": 3,
    }  # fmt: skip
    return TrainConfig(**(known | changes))


def configuration(text: str | Path, *, of_base: dict[str, Any] | None = None, **changes: Any) -> CompareConfig:
    known: dict[str, Any] = {"schemes": ("pre", "post"), "lrs": (1e-3, 1e-2), "seeds": 2, "workers": 1}
    return CompareConfig(base=base(text, **(of_base or {})), **(known | changes))


def long(**changes: Any) -> dict[str, Any]:
    """Two runs, long enough to be caught in the middle."""
    return {"of_base": {"steps": LONG, "saves": 4}, "lrs": [1e-2], "seeds": 1, **changes}


def in_process(text: Path, folder: Path, config: dict[str, Any], **how: Any) -> subprocess.Popen[str]:
    """The same as `compare(configuration(text, **config), folder, **how)`, in a process of its own."""
    call = [sys.executable, "-c", _CALL, str(text), str(folder), json.dumps(config), json.dumps(how)]
    return subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def values(folder: Path) -> dict[str, float | None]:
    """Run to result."""
    lines = (folder / "rows.jsonl").read_text().splitlines() if (folder / "rows.jsonl").exists() else []
    return {row["run"]: row["value"] for row in map(json.loads, lines)}


def losses(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Run to the loss of every step."""
    return {path.parent.name: _losses(path) for path in folder.glob("runs/*/metrics.jsonl")}


def _losses(path: Path) -> list[tuple[int, float]]:
    records = map(json.loads, path.read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved something and is in the middle of it."""
    return any(folder.glob("runs/*/checkpoints/step-*/manifest.json"))


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended before its time: {process.communicate()}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
