"""Metric sinks: JSON lines always; TensorBoard, wandb and trackio on request.

A record is a flat dictionary whose first field is its kind. The JSON-lines file has all records and is what NormLab
reads back; the other sinks get the numbers of "step" and "eval" records.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from normlab.errors import NormLabError, unknown
from normlab.utils.files import file_error, write_atomically

Name = Literal["tensorboard", "wandb", "trackio"]
Record = Mapping[str, Any]

_WITH_NUMBERS = ("step", "eval")


class Sink(Protocol):
    """Receives metric records until it is closed."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None: ...

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps: a run resumed from a checkpoint writes them again."""
        ...

    def close(self) -> None: ...


def open_sinks(names: Sequence[str], folder: Path, config: Record) -> list[Sink]:
    """The JSON-lines file of the run's folder first, then the requested sinks."""
    check_sinks(names)
    folder.mkdir(parents=True, exist_ok=True)
    return [JsonLines(folder / "metrics.jsonl"), *(_SINKS[name](folder, config) for name in dict.fromkeys(names))]


def check_sinks(names: Sequence[str]) -> None:
    """Raise for an unknown sink, and for one whose package is not installed."""
    for name in names:
        if name not in get_args(Name):
            raise unknown("sink", name, get_args(Name))
        _need(name)


class JsonLines:
    """Appends records to a file, one JSON object per line; non-finite numbers become null.

    A line is passed to the system at once, and synced to disk by `flush`. A line cut short by a crash is dropped when
    the file is opened again.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.is_file() and not _ends_whole(path):
            self._rewrite(line for line, _ in _whole_lines(path))
        self._open()

    def write(self, record: Record) -> None:
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise file_error("write", error, self.path) from error

    def flush(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise file_error("write", error, self.path) from error

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                # A full disk raises again on close.
                with suppress(OSError):
                    self._file.close()

    def truncate_after(self, step: int) -> None:
        self._file.close()
        self._rewrite(line for line, record in _whole_lines(self.path) if record.get("step", 0) <= step)
        self._open()

    def _rewrite(self, lines: Iterable[str]) -> None:
        write_atomically(self.path, "".join(lines))

    def _open(self) -> None:
        try:
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise file_error("write", error, self.path) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl file; none if there is no file.

    The file may still be written to: lines that are torn, or no JSON object, are left out.
    """
    return [record for _, record in _whole_lines(path)] if path.is_file() else []


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: Record):
        self._folder = str(folder / "tensorboard")
        self._config = "    " + json.dumps(_plain(config), indent=1).replace("\n", "\n    ")
        self._opened: Any = None

    @property
    def _writer(self) -> Any:
        return self._open() if self._opened is None else self._opened

    def _open(self, **options: Any) -> Any:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._opened = writer(log_dir=self._folder, **options)
        self._opened.add_text("config", self._config)
        return self._opened

    def truncate_after(self, step: int) -> None:
        """Start an event file with `purge_step`, so that viewers drop later steps of earlier files."""
        self.close()
        self._open(purge_step=step + 1)

    def write(self, record: Record) -> None:
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class _Tracker:
    """wandb, or trackio, which has the same interface: a run named after the folder, resumed if it exists."""

    def __init__(self, package: str, folder: Path, **options: Any):
        self._run = importlib.import_module(package).init(
            project="normlab", name=folder.name, resume="allow", **options
        )

    def write(self, record: Record) -> None:
        numbers = dict(_numbers(record))
        if numbers:
            self._run.log(numbers, step=record["step"])

    def flush(self) -> None:
        """Nothing to do: the client sends records by itself."""

    def truncate_after(self, step: int) -> None:
        """Nothing to do: sent records stay, and the client drops steps that it already has."""

    def close(self) -> None:
        self._run.finish()


def _wandb(folder: Path, config: Record) -> Sink:
    return _Tracker("wandb", folder, id=folder.name, dir=str(folder), config=_plain(config))


def _trackio(folder: Path, config: Record) -> Sink:
    return _Tracker("trackio", folder, config=_plain(config))


_SINKS = {"tensorboard": TensorBoard, "wandb": _wandb, "trackio": _trackio}


def _need(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError:
        raise NormLabError(f'{package} is not installed; try: pip install "normlab[{package}]"') from None


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, named as viewers group them: `step/loss`."""
    if record["kind"] in _WITH_NUMBERS:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                yield f"{record['kind']}/{name}", value


def _plain(value: Any) -> Any:
    """Values for JSON: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _ends_whole(path: Path) -> bool:
    return sum(len(line.encode()) for line, _ in _whole_lines(path)) == path.stat().st_size


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file that hold a record, and the record. A power cut leaves zeros and halves of lines: skipped."""
    for raw in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(raw)
        except ValueError:
            continue
        if raw.endswith(b"\n") and isinstance(record, dict):
            yield raw.decode(), record
