"""Logging of a run: metric records to all sinks, and status.json."""

from __future__ import annotations

from typing import Any

from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import open_sinks


class Journal:
    """Writes metric records and the status of a run. Only the first rank writes; all ranks may call it."""

    def __init__(self, folder: RunFolder, config: TrainConfig, group: Group):
        self._folder, self._config, self._writes = folder, config, group.is_main
        self._sinks = open_sinks(config.sinks, folder.path, config.to_dict()) if group.is_main else []

    def tokens(self, step: int) -> int:
        """Training tokens up to and including a step."""
        return step * self._config.batch * self._config.sequence

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def event(self, step: int, what: str, detail: str, *, layer: str | None = None, **facts: float) -> None:
        self.write({"kind": "event", "step": step, "what": what, "layer": layer, "detail": detail, **facts})

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps: a run resumed from a checkpoint writes them again."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def status(self, state: str, step: int, reason: str | None = None, **facts: Any) -> None:
        """Write status.json."""
        if self._writes:
            progress = {"step": step, "of": self._config.steps, "tokens": self.tokens(step)}
            self._folder.set_status(state, **progress, reason=reason, **facts)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
