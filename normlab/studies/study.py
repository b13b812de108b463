"""Study: a TOML file with published claims, the runs that test them, and the rules that turn rows into verdicts.

kind = "train"                 # or ladder, check, simulate, bench, rows
title = "..."
cost = "on one H200: 30 runs of 10M tokens"
gpu_minutes = 17               # 0: no GPU is needed
rows = ["benchmarks/results/a-ladder"]   # folders whose rows are also used; with kind "rows" only these are

[settings]                     # those of `normlab compare` (or ladder, check, simulate, bench step)
[vary]                         # every combination of these lists is an arm: the settings with these changes
[arms.NAME]                    # or arms by name

[[claims]]
name = "clamp"
number = 3                     # of the results listed in normlab/studies/headlines.py
claim = "..."
source = "..."
theirs = "..."
power = "..."                  # what the planned runs could show, said before they are made
own_question = true            # asks what no paper answers; counted apart from results of papers
[claims.rule]
kind = "difference"            # normlab/studies/rules
[claims.correction]            # a fault of the rule that was found after its runs: both verdicts are shown
why = "..."
value = "..."                  # entries of the rule that it replaces
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from normlab.errors import NormLabError, unknown
from normlab.studies.headlines import RESULTS_TESTED
from normlab.studies.rules import VERSION, read_rule
from normlab.studies.rules.base import Rule

Kind = Literal["train", "ladder", "check", "simulate", "bench", "rows"]
Table = dict[str, Any]

FOLDER = Path("studies")
"""Folder of the studies, relative to the repository's root."""
RESULTS = Path("benchmarks/results/studies")
"""Folder of their rows."""

_FIELDS = {"kind", "title", "cost", "gpu_minutes", "rows", "settings", "vary", "arms", "claims"}
_OF_CLAIM = ("name", "number", "claim", "source", "theirs", "power", "own_question", "rule", "correction")
_MAIN = "main"
"""Name of the only arm."""


@dataclass(frozen=True)
class Correction:
    """A fault of a rule, found after its runs; `Claim.rule` is the corrected one. Reports show both verdicts."""

    why: str
    registered: Rule
    """The rule that was registered before the runs."""


@dataclass(frozen=True)
class Claim:
    """One published claim and the rule that tests it."""

    name: str
    claim: str
    source: str
    theirs: str
    """The published number, as stated in the source."""
    rule: Rule
    raw: Mapping[str, Any]
    """The rule as registered, before any correction."""
    number: int | None = None
    """Number of the result that it is a part of, in the list of docs/claims.md."""
    power: str = ""
    """What the planned runs could show, said before they are made; a finding has the power of the runs themselves."""
    own_question: bool = False
    """Whether it asks what no paper answers: a question that one leaves open, or another time or budget."""
    correction: Correction | None = None


@dataclass(frozen=True)
class Study:
    """A parsed study file, validated as far as possible without torch."""

    name: str
    kind: Kind
    title: str
    cost: str
    claims: tuple[Claim, ...]
    settings: Table
    arms: dict[str, Table]
    """Changed settings of each arm, by name."""
    rows: tuple[str, ...] = ()
    gpu_minutes: float = 0.0
    """Estimated minutes on one H200; 0: no GPU is needed."""

    @cached_property
    def rule_hash(self) -> str:
        """Hash of all rules as written: changing one invalidates the rows made before."""
        rules = {claim.name: claim.raw for claim in self.claims}
        text = json.dumps({"version": VERSION, "rules": rules}, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def settings_of(self, arm: str) -> Table:
        """All settings of an arm."""
        return {**self.settings, **self.arms[arm]}


def find_studies(folder: Path = FOLDER) -> list[str]:
    """The names of all studies."""
    if not folder.is_dir():
        raise NormLabError(f"there is no folder {folder}; call this from the root of the repository, or name --studies")
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_study(name: str, folder: Path = FOLDER) -> Study:
    """The study with this name, or the one in this file."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise NormLabError(f"there is no file {path}; name a study of {folder}, or a TOML file")
        raise unknown("study", name, find_studies(folder))
    try:
        return read_study(path.stem, tomllib.loads(path.read_text(encoding="utf-8")), path.name)
    except OSError as error:
        raise NormLabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NormLabError(f"{path} is not valid TOML: {error}; the files of studies/ are examples") from None


def read_study(name: str, table: Mapping[str, Any], where: str) -> Study:
    """Parse a study from the contents of its file; `where` is the file for error messages."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise NormLabError(
            f"{where}: a study's name is of lower-case letters, digits, dots and hyphens, got {name!r}; rename the file"
        )
    for field in table:
        if field not in _FIELDS:
            raise unknown(f"field in {where}", field, _FIELDS)
    kind = table.get("kind", "train")
    if kind not in get_args(Kind):
        raise unknown(f"kind in {where}", str(kind), get_args(Kind))
    claims = tuple(_claim(entry, where) for entry in _tables(table, "claims", where))
    names = [claim.name for claim in claims]
    if not claims or len({*names}) < len(names):
        raise NormLabError(f"{where}: a study has at least one [[claims]], each with a name of its own")
    settings = {section: _table(table, section, where) for section in ("settings", "vary", "arms")}
    return Study(
        name=name, kind=kind, title=_text(table, "title", where), cost=_text(table, "cost", where), claims=claims,
        settings=settings["settings"], arms=_arms(settings["arms"], settings["vary"], where),
        rows=tuple(_strings(table.get("rows", []), f"{where}: rows")), gpu_minutes=_minutes(table, where),
    )  # fmt: skip


def _claim(table: Mapping[str, Any], where: str) -> Claim:
    name = _text(table, "name", f"{where}, a claim")
    where = f"{where}, claim {name}"
    for field in table:
        if field not in _OF_CLAIM:
            raise unknown(f"field in {where}", field, _OF_CLAIM)
    texts = {field: _text(table, field, where) for field in ("claim", "source", "theirs")}
    number = table.get("number")
    if number is not None and number not in RESULTS_TESTED:
        raise NormLabError(f"{where}: number must be one of docs/claims.md, 1 to {len(RESULTS_TESTED)}, got {number!r}")
    rule, raw = read_rule(table.get("rule"), f"{where}, rule"), table.get("rule") or {}
    power = _text(table, "power", where) if "power" in table else ""
    own = table.get("own_question", False)
    if not isinstance(own, bool):
        raise NormLabError(f"{where}: own_question must be true or false, got {own!r}; leave it out for false")
    known = {**texts, "raw": raw, "number": number, "power": power, "own_question": own}
    if "correction" not in table:
        return Claim(name=name, rule=rule, **known)
    changes = dict(_table(table, "correction", where))
    why = _text(changes, "why", f"{where}, correction")
    corrected = read_rule({**raw, **{key: changes[key] for key in changes if key != "why"}}, f"{where}, correction")
    if corrected == rule:
        raise NormLabError(f"{where}, correction: it changes nothing of the rule; name the entries that it replaces")
    return Claim(name=name, rule=corrected, correction=Correction(why, rule), **known)


def _arms(named: Table, vary: Table, where: str) -> dict[str, Table]:
    """Every named arm with every combination of the varied settings; the combination is part of its name."""
    for name, value in vary.items():
        if not isinstance(value, list) or not value:
            raise NormLabError(f"{where}: vary.{name} must be a list of values, got {value!r}; try [{value!r}]")
    mixes = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    arms: dict[str, Table] = {}
    for name, changes in (named or {"": {}}).items():
        if not isinstance(changes, dict):
            raise NormLabError(f"{where}: arms.{name} must be a table of settings, got {changes!r}; try [arms.{name}]")
        for mix in mixes:
            parts = [name, *(f"{key}={_short(value)}" for key, value in mix.items())]
            arms[",".join(part for part in parts if part) or _MAIN] = {**changes, **mix}
    for name in arms:
        if not re.fullmatch(r"[\w.,=+()-]+", name) or name.startswith("."):
            raise NormLabError(f"{where}: arm {name!r} must be fit for a folder's name; use letters, digits, .,=+-()")
    return arms


def _minutes(table: Mapping[str, Any], where: str) -> float:
    found = table.get("gpu_minutes", 0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise NormLabError(f"{where}: gpu_minutes must be a number from 0 on, got {found!r}; try 60")
    return float(found)


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(table: Mapping[str, Any], name: str, where: str) -> Table:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise NormLabError(f"{where}: {name} must be a table, got {found!r}; write [{name}]")
    return found


def _tables(table: Mapping[str, Any], name: str, where: str) -> list[Table]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise NormLabError(f"{where}: {name} must be tables, written [[{name}]], got {found!r}")
    return found


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    found = table.get(name)
    if not isinstance(found, str) or not found.strip():
        raise NormLabError(f'{where}: {name} must be a text, got {found!r}; write {name} = "..."')
    return " ".join(found.split())


def _strings(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise NormLabError(f"{where} must be a list of texts, got {value!r}")
    return value
