"""Folders of runs made by hand: records as `normlab train` and `normlab.checks.Watch` write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HOSTILE = "<img src=x onerror=alert(1)>"


def step(number: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    falling = 1.5 + 4.0 * math.exp(-number / 60)
    return {
        "kind": "step", "step": number, "tokens": 512 * number, "loss": falling if loss is None else loss,
        "lr": 1e-3, "grad_norm": 1.0 + 1.0 / number, "tokens_per_s": 7300.0, "seconds": 0.1 * number, **more,
    }  # fmt: skip


def evaluation(number: int, loss: float = 2.0) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "tokens": 512 * number, "loss": loss, "bits_per_byte": loss / math.log(2)}


def profile(number: int, blocks: int = 4, growth: float = 1.0) -> dict[str, Any]:
    layers = range(blocks + 1)
    return {
        "kind": "profile", "step": number, "layers": list(layers), "hidden_rms": [growth**k for k in layers],
        "update_ms": [None, *(0.04 * growth**k for k in layers[1:])], "angular_speed": [None, *([0.1] * blocks)],
        "token_cosine": [0.05 * (k + 1) for k in layers], "effective_rank": [16.0 - k for k in layers],
        "grad_norm": [2.0 ** (blocks - k) for k in layers], "sensitivity": 1.0,
    }  # fmt: skip


def event(number: int, what: str, detail: str) -> dict[str, Any]:
    return {"kind": "event", "step": number, "what": what, "layer": None, "detail": detail}


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def run(folder: Path, records: Iterable[Mapping[str, Any]] = (), *, of: int = 400, **status: Any) -> Path:
    """The folder of a run; `status` is the content of its status.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"config": {"steps": of}, "device": "CPU"}))
    if status:
        (folder / "status.json").write_text(json.dumps({"of": of, **status}))
    write(folder / "metrics.jsonl", records)
    return folder


def zoo(root: Path) -> Path:
    """A comparison with a run in every state."""
    usual = [
        profile(0),
        *map(step, range(1, 201)),
        evaluation(100, 2.4),
        evaluation(200, 1.9),
        profile(200, growth=3.0),
    ]
    stuck = event(150, "stuck", "stuck at the entropy of single tokens (3.12): loss 3.10 after 150 steps")
    flat = [step(k, 3.1 + 0.01 * math.sin(k)) for k in range(1, 180)]
    spike = event(90, "spike", "step 90: loss 9.1 exceeds 3.2; gradient norm 40; blocks.3.mlp")
    broken = event(120, "nonfinite", "step 120: loss is nan; blocks.2.attention is the first that was not finite")
    result = {"diverged": 120, "stuck": None}
    run(root / "runs/training", usual, state="running", step=200)
    done = [
        profile(0),
        *(step(k, 1.2 + 4.4 * math.exp(-k / 50)) for k in range(1, 201)),
        evaluation(200, 1.4),
        profile(200),
    ]
    run(root / "runs/finished", done, of=200, state="done", step=200, result={"stuck": False, "diverged": None})
    run(root / "runs/stuck", [*flat, stuck], state="running", step=179)
    run(
        root / "runs/diverged",
        [*(step(k, 5.8 - k / 40) for k in range(1, 121)), spike, broken],
        state="failed",
        reason="loss is nan",
        result=result,
    )
    run(
        root / "runs/stopped",
        [*map(step, range(1, 60)), event(59, "saved", "Ctrl-C")],
        state="stopped",
        reason="Ctrl-C",
    )
    run(root / "runs/new")
    return root
