"""Made-up comparison and run folders with the shape of real ones: noise, a failure, profiles, text that attacks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normlab.compare.store import Store

HOSTILE = "post <script>alert(1)</script> | <b>b</b> **b** & \u2028 %{x}"
# What each scheme's loss ends at relative to pre, and how fast its hidden state grows with depth.
SCHEMES = {"pre": (0.0, 0.10), "post": (0.012, 0.0), "peri": (-0.049, 0.14), "geonorm": (-0.022, 0.0)}
VERSIONS = {"normlab": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}
TUNE, JUDGE = (101, 102, 103), (1, 2, 3)


def comparison(
    folder: Path,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    lrs: Sequence[float] = (6e-4, 1.2e-3),
    tune: Sequence[int] = TUNE,
    judge: Sequence[int] = JUDGE,
    steps: int = 120,
    blocks: int = 8,
    profiles: bool = True,
    hostile: bool = True,
    fails: bool = True,
    running: bool = False,
) -> Path:
    """Write a whole comparison: every rate on the tune seeds, the better one on the judge seeds."""
    folder.mkdir(parents=True)
    about = {
        "schemes": list(schemes), "lrs": list(lrs), "seeds": len(judge), "tokens": steps * 4096, "metric": "val_loss",
        "baseline": schemes[0], "versions": VERSIONS,
        "command": ["normlab", "compare", "--schemes", *schemes, "--lrs", *map(str, lrs), "--seeds", str(len(judge))],
    }  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(about))
    store = Store(folder)
    for scheme in schemes:
        label = HOSTILE if hostile and scheme == "post" else scheme
        plan = [("tune", lr, seed) for lr in lrs for seed in tune] + [("judge", max(lrs), seed) for seed in judge]
        for role, lr, seed in plan:
            broken = fails and scheme == "post" and role == "judge" and seed == judge[-1]
            row = _row(scheme, label, lr, seed, role, steps, broken)
            _write_run(folder / "runs" / row["run"], row, steps, blocks, profiles)
            store.append(row)
    if running:
        run(folder / "runs" / "geonorm-under-way", scheme="geonorm", state="running", steps=steps // 3)
    return folder


def run(folder: Path, *, scheme: str = "peri", state: str = "done", steps: int = 120, profiles: bool = True) -> Path:
    """Write the folder of a single run."""
    row = _row(scheme, scheme, 1e-3, 7, "judge", steps, state == "failed")
    _write_run(folder, row | {"state": state}, steps, 8, profiles)
    return folder


def _row(scheme: str, label: str, lr: float, seed: int, role: str, steps: int, broken: bool) -> dict[str, Any]:
    value = None if broken else _final_loss(scheme, lr, seed)
    done = steps // 2 if broken else steps
    slow = {"pre": 1.0, "post": 0.99, "peri": 0.94, "geonorm": 0.91}.get(scheme, 1.0)
    return {
        "run": f"{scheme}-{lr:g}-{seed}", "scheme": scheme, "label": label, "lr": lr, "seed": seed, "role": role,
        "state": "failed" if broken else "done", "reason": "the loss is not finite <i>" if broken else None,
        "metric": "val_loss", "value": value, "loss": value, "bits_per_byte": None if value is None else value / 2.8,
        "tokens": done * 4096, "steps": done, "seconds": done * 0.2 / slow, "tokens_per_s": 20480.0 * slow,
        "peak_bytes": int(1.5e9 / slow), "device": "Test GPU & co", "gpu": f"{scheme} {lr} {seed}",
        "versions": VERSIONS, "config": _config(scheme, lr, seed),
        "started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:05:00+00:00",
    }  # fmt: skip


def _config(scheme: str, lr: float, seed: int) -> dict[str, Any]:
    model = {"scheme": scheme, "depth": 8, "dim": 256, "heads": 4, "vocab_size": 256}
    data = {"sources": ["books/<b>.jsonl"], "length": 512}
    return {"model": model, "data": data, "lr": lr, "seed": seed, "schedule": "cosine", "clip": 1.0}


def _final_loss(scheme: str, lr: float, seed: int) -> float:
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, *scheme.encode()])
    # The seed moves all schemes alike (the same batches); what is left is their own.
    return 4.16 + SCHEMES[scheme][0] + 0.04 * (lr < 1e-3) + 0.02 * shared.normal() + 0.002 * own.normal()


def _write_run(folder: Path, row: dict[str, Any], steps: int, blocks: int, profiles: bool) -> None:
    folder.mkdir(parents=True)
    config = {**row["config"], "run": row["run"], "versions": row["versions"]}
    (folder / "config.json").write_text(json.dumps(config))
    status = {"state": row["state"], "step": row["steps"], "tokens": row["tokens"], "reason": row["reason"]}
    (folder / "status.json").write_text(json.dumps(status))
    records = _metrics(row, steps, blocks, profiles)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _metrics(row: dict[str, Any], steps: int, blocks: int, profiles: bool) -> Iterator[dict[str, Any]]:
    noise = np.random.default_rng([row["seed"], *row["scheme"].encode(), int(1e6 * row["lr"])])
    floor = row["value"] if row["value"] is not None else 4.2
    scale = row["seconds"] / row["steps"]
    for step in range(1, row["steps"] + 1):
        loss = floor + 5.5 * math.exp(-6.0 * step / steps) + 0.05 * noise.normal()
        if row["state"] == "failed" and step > row["steps"] - 6:
            loss += 3.0 ** (step - row["steps"] + 6)
        yield {
            "kind": "step", "step": step, "tokens": step * 4096, "loss": loss, "lr": row["lr"],
            "grad_norm": 1.0, "tokens_per_s": row["tokens_per_s"], "mfu": 0.52, "seconds": step * scale,
            "memory_bytes": row["peak_bytes"],
        }  # fmt: skip
        if step % max(1, steps // 12) == 0:
            clean = floor + 5.5 * math.exp(-6.0 * step / steps)
            yield {"kind": "eval", "step": step, "tokens": step * 4096, "loss": clean, "bits_per_byte": clean / 2.8}
            if profiles:
                yield _profile(row["scheme"], step, blocks, step / steps)
    if row["state"] == "failed":
        yield {"kind": "step", "step": row["steps"] + 1, "loss": math.nan, "tokens": None}
        yield {"kind": "event", "step": row["steps"], "what": "nonfinite", "layer": "layers.7.mlp", "detail": "<u>inf"}


def _profile(scheme: str, step: int, blocks: int, progress: float) -> dict[str, Any]:
    growth = SCHEMES.get(scheme, (0.0, 0.05))[1] * (1 + 2 * progress)
    layers = list(range(blocks + 1))
    return {
        "kind": "profile", "step": step, "layers": layers,
        "hidden_rms": [math.exp(growth * k) for k in layers],
        "grad_norm": [1e-3 * math.exp(-0.8 * growth * k) * (1.3 - progress) for k in layers],
        "update_ms": [None, *((growth * math.exp(growth * k)) ** 2 for k in layers[1:])],
        "angular_speed": [None, *(0.5 / (1 + 3 * growth * k) for k in layers[1:])],
        "token_cosine": [0.9 - 1.8 * math.exp(-growth * k) for k in layers],
        "effective_rank": [40.0 / (1 + growth * k) if k % 2 == 0 else None for k in layers],
        "sensitivity": 1.0 + growth, "first_copy_loss": 8.0, "second_copy_loss": 8.0 - 6.0 * progress,
    }  # fmt: skip
