"""Layout of a run's folder, its configuration and its status.

RUN/
config.json        the configuration, versions and device, and the command that began the run
status.json        running, done, stopped, failed or stuck, and how far
metrics.jsonl      one JSON record per line; kinds: step, eval, profile, event
checkpoints/       the newest few, while the run is not finished
branches/          checkpoints that runs with smaller budgets start from
tokenizer.json     the tokenizer of a run on text, or
classes.json       the names of the classes of images
model.safetensors  the weights at the end
trouble/           batches at which the loss was not finite or spiked
lock               held by the process that writes
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError, in_one_line
from normlab.train.config import TrainConfig, not_decisive
from normlab.utils.files import read_json, write_json
from normlab.utils.versions import versions

ENDED = ("done", "stuck")
"""States of a run that has ended: its result is read, nothing is trained."""


class RunFolder:
    """The paths of a run, its configuration and its status."""

    def __init__(self, path: Path, command: Sequence[str] = ()):
        self.path, self._command = path, list(command)
        self.metrics, self.checkpoints = path / "metrics.jsonl", path / "checkpoints"
        self.branches = path / "branches"
        self.weights, self.trouble = path / "model.safetensors", path / "trouble"
        self.tokenizer, self.classes = path / "tokenizer.json", path / "classes.json"
        self.lock = path / "lock"

    @property
    def exists(self) -> bool:
        return (self.path / "config.json").is_file()

    def begin(self, config: TrainConfig, device: str, **facts: Any) -> None:
        """Write config.json with further facts, or raise if the folder holds a run of another configuration."""
        if self.exists:
            self._about()
        # A run that never started may be replaced: wrong settings are corrected in place.
        if self.has_begun:
            there = self.config if self.exists else self._found_elsewhere()
            if there.identity != config.identity:
                raise NormLabError(
                    f"{self.path} holds another run ({difference(there, config)}); "
                    f"choose another folder with --out, or remove this one"
                )
            if self.exists:
                return
        about = {"config": config.to_dict(), "versions": versions(), "device": device, **facts}
        write_json(self.path / "config.json", about | ({"command": self._command} if self._command else {}))

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds results: a status, metrics, weights or a checkpoint."""
        written = self.metrics.is_file() and self.metrics.stat().st_size > 0
        kept = self.weights.is_file() or any(self.checkpoints.glob("step-*"))
        return self.status["state"] != "new" or written or kept

    @property
    def is_resumable(self) -> bool:
        """Whether there is a checkpoint to go on from, or nothing left to do."""
        return any(self.checkpoints.glob("step-*")) or self.status["state"] in ENDED

    def _found_elsewhere(self) -> TrainConfig:
        """The configuration of a run without config.json, from its checkpoints or its weights."""
        for state in sorted(self.checkpoints.glob("step-*/state.json"), reverse=True):
            if "config" in (extra := read_json(state)["extra"]):
                return TrainConfig.from_dict(extra["config"])
        if self.weights.is_file():
            from normlab.train.storage.weights import read_metadata

            return TrainConfig.from_dict(read_metadata(self.weights)["config"])
        raise NormLabError(
            f"{self.path} holds a run that has lost its config.json, so its settings are not known; restore the file, "
            f"or choose another folder with --out"
        )

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run."""
        if not self.exists:
            raise NormLabError(
                f"{self.path} is not a run: it has no config.json; expected a folder made by normlab train"
            )
        stored = self._about()["config"]
        with in_one_line(f"{self.path / 'config.json'} cannot be read", "restore it, or name another run"):
            return TrainConfig.from_dict(stored)

    def _about(self) -> dict[str, Any]:
        """The content of config.json; raises for that of another program."""
        about = read_json(self.path / "config.json")
        if not isinstance(about, dict) or "config" not in about:
            raise NormLabError(f"{self.path}/config.json is not that of a run; expected a folder made by normlab train")
        return about

    @property
    def trunk(self) -> Path | None:
        """The folder of the run that this one branched off; None: it began at its first step."""
        branch = self._about().get("branch") if self.exists else None
        return None if branch is None else Path(branch["trunk"])

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json; `{"state": "new"}` before the run began."""
        path = self.path / "status.json"
        if not path.is_file():
            return {"state": "new"}
        status = read_json(path)
        if not isinstance(status, dict) or "state" not in status:
            raise NormLabError(f"{path} says no state of a run; restore it, or remove it")
        return status

    def set_status(self, state: str, **facts: Any) -> None:
        write_json(self.path / "status.json", {"state": state, "at": now(), **facts})

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint, from which the run goes on; 0 if there is none."""
        names = [path.name for path in self.checkpoints.glob("step-*") if path.is_dir()]
        return max((int(step) for name in names if (step := name.removeprefix("step-")).isdigit()), default=0)

    def drop_checkpoints(self) -> None:
        """Delete the checkpoints of a finished run, whose weights are exported."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def difference(there: TrainConfig, given: TrainConfig) -> str:
    """The first field in which two configurations differ."""
    old, new = there.shared_dict(), given.shared_dict()
    old, new = old | old.pop("model"), new | new.pop("model")
    free = not_decisive(given.trouble)
    name = next(name for name in {**new, **old} if old.get(name) != new.get(name) and name not in free)
    return f"its {name} is {old.get(name)!r}, not {new.get(name)!r}"
