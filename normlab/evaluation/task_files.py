"""Task files of users (YAML of lm-evaluation-harness): which tasks they hold, and that they run no code.

Allowed is what only describes a task: local data (json, csv, parquet, text, arrow) or a data set of the hub, Jinja
templates (which run in a sandbox), metrics of the harness itself. Refused, unless asked for, is what would run Python:
`!function`, `class`, `custom_dataset`, `hf_evaluate`, `unsafe_code`, `trust_remote_code`, data scripts and pickles.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.utils.files import digest
from normlab.utils.lazy import import_optional

_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.py)")
_METRICS = (
    "acc", "acc_bytes", "acc_mutual_info", "acc_norm", "bits_per_byte", "brier_score", "byte_perplexity",
    "exact_match", "f1", "likelihood", "mcc", "perplexity", "word_perplexity",
)  # fmt: skip
"""Metrics that the harness computes itself: it looks for any other name on the hub, and runs what it finds."""
_CODE_KEYS = ("class", "custom_dataset", "hf_evaluate", "trust_remote_code", "unsafe_code")
_ALLOW = "add --allow-code if you trust the file"


@dataclass(frozen=True)
class TaskFile:
    """One YAML file, with those that it includes."""

    path: Path
    settings: Mapping[str, Any]
    sources: tuple[Path, ...]
    """The file and the files that it includes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name of its task or group, and its tags."""
        named = self.settings.get("group") or self.settings.get("task")
        tags = self.settings.get("tag") or []
        return tuple(str(name) for name in (named, *([tags] if isinstance(tags, str) else tags)) if name)

    @property
    def group_by(self) -> str | None:
        """The field that names the group of a question, if questions of a group are not independent."""
        metadata = self.settings.get("metadata")
        found = metadata.get("group_by") if isinstance(metadata, Mapping) else None
        return None if found is None else str(found)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files and of the local data that they name."""
        data = [Path(name) for name in _strings(self.settings.get("dataset_kwargs")) if Path(name).is_file()]
        return hashlib.sha256(repr([digest(path)[1] for path in (*self.sources, *data)]).encode()).hexdigest()


def read_task_files(places: Iterable[str], *, allow_code: bool) -> list[TaskFile]:
    """Read YAML files and folders of some; raises for what is missing, broken, or would run code."""
    found: list[TaskFile] = []
    for place in map(Path, places):
        if not place.exists():
            raise NormLabError(f"--task-files {place} does not exist; expected a YAML file or a folder of some")
        # The harness reads this suffix alone.
        paths = [place] if place.is_file() else sorted(place.rglob("*.yaml"))
        if not paths:
            raise NormLabError(f"--task-files {place} holds no .yaml file; expected tasks of lm-evaluation-harness")
        found += [_read(path, allow_code) for path in paths]
    if not any(file.names for file in found):
        raise NormLabError("--task-files name no task; expected a YAML file with `task: NAME`")
    return found


def _read(path: Path, allow_code: bool) -> TaskFile:
    sources: list[Path] = []
    settings = _merged(path.resolve(), allow_code, sources)
    if not allow_code:
        _refuse_code(path, settings)
    return TaskFile(path, settings, tuple(sources))


def _merged(path: Path, allow_code: bool, sources: list[Path]) -> dict[str, Any]:
    """The settings of a file over those that it includes, as the harness merges them."""
    if path in sources:
        raise NormLabError(f"{path} includes itself; remove one `include`")
    sources.append(path)
    settings = _parse(path, allow_code)
    includes = settings.pop("include", [])
    merged: dict[str, Any] = {}
    for name in [includes] if isinstance(includes, str) else includes:
        merged |= _merged((path.parent / name).resolve(), allow_code, sources)
    return merged | settings


def _parse(path: Path, allow_code: bool) -> dict[str, Any]:
    yaml = import_optional("yaml", "eval", "normlab eval --task-files")

    class Loader(yaml.SafeLoader): ...

    def function(loader: Any, node: Any) -> str:
        if not allow_code:
            raise NormLabError(f"{path} runs the Python function {node.value}; {_ALLOW}")
        return loader.construct_scalar(node)

    Loader.add_constructor("!function", function)
    try:
        settings = yaml.load(path.read_bytes(), Loader=Loader)
    except OSError as error:
        raise NormLabError(f"{path} cannot be read: {error.strerror or error}; check the path") from None
    except yaml.YAMLError as error:
        raise NormLabError(f"{path} is not YAML ({' '.join(str(error).split())[:200]}); mend it") from None
    if not isinstance(settings, dict):
        raise NormLabError(f"{path} holds {type(settings).__name__}, expected the settings of a task")
    return settings


def _refuse_code(path: Path, settings: Mapping[str, Any]) -> None:
    for part in _mappings(settings):
        key = next((key for key in _CODE_KEYS if part.get(key)), None)
        if key is not None:
            raise NormLabError(f"{path}: {key!r} runs Python code; {_ALLOW}")
        data, metric = part.get("dataset_path"), part.get("metric")
        if data is not None and data not in _FORMATS and not _HUB_ID.fullmatch(str(data)):
            known = f"{', '.join(_FORMATS)} or an id of the hub"
            raise NormLabError(f"{path}: dataset_path {data!r} may run code; expected {known}, or {_ALLOW}")
        if metric is not None and metric not in _METRICS:
            known = ", ".join(_METRICS)
            raise NormLabError(f"{path}: metric {metric!r} would be code from the hub; expected {known}, or {_ALLOW}")


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _mappings(part)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _strings(part)
