"""What is known of a scheme outside its file: measured speed, studies that test it, published models that have it.

Everything is read from the repository: benchmarks/results, studies/, and the matrix of docs/guides/converting.md.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from normlab.errors import NormLabError
from normlab.schemes import Scheme, scheme
from normlab.schemes.catalog.cited_claims import Role

ROOT = Path(__file__).parents[1]
SHAPE = [65536, 768]
"""Tokens × width of the kernels that a page shows."""
INTRODUCED: dict[Role, str] = {"subject": "", "compared": "Claims on other schemes that are compared with it:\n\n"}


def sections(of: Scheme, cited: Mapping[Role, Sequence[str]]) -> list[tuple[str, str]]:
    """Heading and text, for a scheme's page; `cited` are verdicts on claims, by its role in them."""
    found = [("Used by", users(of.name)), ("Speed", speed(of)), ("Evidence", evidence(of.name, cited))]
    return [(heading, text) for heading, text in found if text]


def speed(of: Scheme) -> str:
    """Its newest training step against Pre-Norm's, and its fused kernels, with machine and date."""
    lines = [line for line in (_step(of.name), *_kernels(of)) if line]
    return "\n".join(lines) + "\n\n[All figures](../../benchmarks/README.md)." if lines else ""


def _step(name: str) -> str:
    found = [
        (record, row) for record, row in _rows("step")
        if row.get("scheme") == name and row["kernels"] == "triton" and "--preset" not in record["command"]
    ]  # fmt: skip
    if not found or not {"over_pre", "memory_over_pre", "paired"} <= set(found[-1][1]):
        return ""
    record, row = found[-1]
    return (
        f"- Training step at 125M: {median(row['tokens_per_second']):,.0f} tokens a second,"
        f" {row['over_pre']:.3f} of Pre-Norm's,"
        f" {row['memory_over_pre']:.3f} of its memory"
        f" (median of {len(row['paired'])} interleaved repeats; {_source(record)})."
    )


def _kernels(of: Scheme) -> list[str]:
    """A line per fused kernel of the scheme: its newest figures in both directions."""
    newest: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}
    for record, row in _rows("kernels"):
        if row.get("shape") == SHAPE and _has(row["case"], of):
            newest.setdefault(row["case"], {})[row["direction"]] = (record, row)
    return [_kernel(case, ways) for case, ways in newest.items() if {"forward", "backward"} <= set(ways)]


def _kernel(case: str, ways: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> str:
    shares = " / ".join(f"{ways[way][1]['share']:.2f}" for way in ("forward", "backward"))
    ratios = " / ".join(f"{ways[way][1]['over_compiled']:.2f}" for way in ("forward", "backward"))
    return (
        f"- Fused kernel, {case}, {SHAPE[0]} × {SHAPE[1]}, forward / backward: {shares} of the copy bandwidth,"
        f" {ratios} × as fast as `torch.compile` ({_source(ways['forward'][0])})."
    )


def _has(case: str, of: Scheme) -> bool:
    """Whether a kernel is that of a scheme: named first in brackets, or by the first word."""
    return f"({of.name})" in case or f"({of.name} " in case or case.partition(" ")[0] in of.aliases


def _source(record: dict[str, Any]) -> str:
    return (
        f"`{record['command']}`, {record['device']}, torch {record['torch'].partition('+')[0]}, {record['date'][:10]}"
    )


@cache
def _rows(kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of all complete benchmarks of a kind (step, kernels), the newest last."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"????-??-??-{kind}-*.json"))
    records = [record for record in map(_read, files) if record.get("complete") and "command" in record]
    return [(record, row) for record in sorted(records, key=lambda record: record["date"]) for row in record["rows"]]


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text("utf-8"))
    return found if isinstance(found, dict) else {}


def evidence(name: str, cited: Mapping[Role, Sequence[str]]) -> str:
    """Verdicts on claims, then the other studies that it is part of."""
    verdicts = [verdict for own in cited.values() for verdict in own]
    others = [
        f"- `{study}`: {title}"
        for study, title, names in studies()
        if name in names and not any(f"#{study})" in verdict for verdict in verdicts)
    ]
    parts = [INTRODUCED[role] + "\n".join(f"- {verdict}" for verdict in own) for role, own in cited.items() if own]
    if others:
        parts.append("Other studies that it is part of ([claims](../claims.md)):\n\n" + "\n".join(others))
    return "\n\n".join(parts)


@cache
def studies() -> list[tuple[str, str, frozenset[str]]]:
    """Name, title and schemes of every study."""
    found = [(path.stem, tomllib.loads(path.read_text("utf-8"))) for path in sorted((ROOT / "studies").glob("*.toml"))]
    return [(name, study["title"], frozenset(_schemes(study))) for name, study in found]


def _schemes(study: dict[str, Any]) -> set[str]:
    """Names of the schemes that a study compares or whose claims it decides, without their options."""
    specs = list(study.get("settings", {}).get("schemes", []))
    for claim in study["claims"]:
        specs += [claim["rule"][key] for key in ("scheme", "against") if key in claim["rule"]]
    return {name for spec in specs if (name := _name(str(spec)))}


def _name(spec: str) -> str | None:
    """`pre@no-decay` → `pre`; None for what is not a scheme, such as an experiment."""
    try:
        return scheme(spec.partition("@")[0]).name
    except NormLabError:
        return None


def users(name: str) -> str:
    """Published architectures that have it by default, as `normlab.hf.identify` finds them."""
    guide = (ROOT / "docs" / "guides" / "converting.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)`(, parallel)? \|", guide, re.MULTILINE)
    found = [title + (" (parallel)" if parallel else "") for title, has, parallel in rows if has == name]
    if not found:
        return ""
    listed = ", ".join(found)
    return f"{listed}: default configurations in transformers, [found by their structure](../guides/converting.md)."
