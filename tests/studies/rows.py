"""Rows that nobody ran, to ask rules about, and a study that is small enough to run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from normlab.studies.evidence import Evidence
from normlab.studies.study import Study, read_study

TINY = """
title = "A tiny study"
cost = "two seconds on one core"

[settings]
schemes = ["pre", "post"]
lrs = [1e-2]
seeds = 3
workers = 1
depth = 2
dim = 16
heads = 2
length = 32
batch = 4
tokens = 1536
device = "cpu"
evals = 2
eval_tokens = 600
saves = 0

[[claims]]
name = "gap"
claim = "Pre-Norm is not more than 2 nats away from Post-Norm."
source = "nobody"
theirs = "2 nats"
[claims.rule]
kind = "difference"
scheme = "pre"
against = "post"
direction = "within"
by = 2.0

[[claims]]
name = "never"
claim = "Pre-Norm never diverges."
source = "nobody"
theirs = "0 of 3"
[claims.rule]
kind = "count"
scheme = "pre"
at_most = 0.0
"""


def row(scheme: str, seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    state = "done" if value is not None else "failed"
    known = {
        "run": f"{scheme}-{seed}-{more.get('lr', 1e-3)}", "scheme": scheme, "label": scheme, "lr": 1e-3, "seed": seed,
        "role": "judge", "state": state, "reason": None, "metric": "val_loss", "value": value, "loss": value,
        "started": "2026-01-02", "finished": "2026-01-02", "versions": {}, "arm": "main",
    }  # fmt: skip
    return known | more


def rows_of(values: dict[str, list[float | None]], **more: Any) -> list[dict[str, Any]]:
    return [row(scheme, seed, value, **more) for scheme, own in values.items() for seed, value in enumerate(own)]


def evidence(values: dict[str, list[float | None]], **more: Any) -> Evidence:
    return Evidence({"main": rows_of(values, **more)})


def write_study(folder: Path, text: str = TINY, name: str = "tiny", **settings: Any) -> Path:
    """A folder of studies with one in it; `settings` are added to its own."""
    folder.mkdir(exist_ok=True)
    lines = "".join(f"{key} = {value!r}\n" for key, value in settings.items())
    (folder / f"{name}.toml").write_text(text.replace("[settings]\n", f"[settings]\n{lines}"))
    return folder


CLAIM = """
[[claims]]
name = "it"
claim = "It holds."
source = "nobody"
theirs = "all"
[claims.rule]
"""


def other(kind: str, settings: str, rule: str, head: str = "") -> Study:
    """A study of one claim, "it"."""
    text = f'kind = "{kind}"\ntitle = "T"\ncost = "none"\n{head}\n[settings]\n{settings}\n{CLAIM}{rule}'
    return read_study("other", tomllib.loads(text), "other.toml")
