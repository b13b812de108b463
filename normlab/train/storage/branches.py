"""Checkpoints of a trunk that other runs start from: TRUNK/branches/step-00000080.

Copies of checkpoints are hard links where the file system allows it: a checkpoint's files are never changed in place.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from normlab.utils.files import digest, file_error, read_json, replacing_folder, write_json


def keep(checkpoint: Path, folder: Path) -> None:
    """Keep a checkpoint of a trunk in its folder of branches."""
    _copy(checkpoint, folder)


def plant(checkpoint: Path, folder: Path, config: dict[str, Any]) -> None:
    """Copy a checkpoint of a trunk into the folder of a branch, with the branch's configuration."""
    _copy(checkpoint, folder, config)


def config_of(checkpoint: Path) -> dict[str, Any]:
    """The configuration of the run that saved a checkpoint."""
    return read_json(checkpoint / "state.json")["extra"]["config"]


def _copy(checkpoint: Path, folder: Path, config: dict[str, Any] | None = None) -> None:
    try:
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(".step-*.part"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise file_error("make", error, folder) from error
    with replacing_folder(folder / checkpoint.name) as part:
        shutil.copytree(checkpoint, part, copy_function=_link, dirs_exist_ok=True)
        if config is not None:
            _set_config(part, config)


def _set_config(checkpoint: Path, config: dict[str, Any]) -> None:
    state, manifest = read_json(checkpoint / "state.json"), read_json(checkpoint / "manifest.json")
    state["extra"]["config"] = config
    write_json(checkpoint / "state.json", state)
    manifest["files"]["state.json"] = digest(checkpoint / "state.json")
    write_json(checkpoint / "manifest.json", manifest)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
