"""Check the requirements of all studies of a call before the first one starts.

Nothing is read, trained or written: data and tokenizers are looked for, settings and rules are checked, rows must have
been made under the same rules, and results must be writable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.models.config import TransformerConfig
from normlab.studies.items import study_items
from normlab.studies.record import StudyRecord
from normlab.studies.run import check_rules, comparison_configs, ladder_configs
from normlab.studies.study import Study
from normlab.train.config import TrainConfig
from normlab.train.distributed import pick_device
from normlab.utils.text import counted
from normlab.utils.versions import is_unnamed_copy


def check_ready(study: Study, results: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """Raise in one line if a study could not start here; return what there is of it, e.g. "12 rows in FOLDER".

    Paths of data are relative to the current folder.
    """
    folder = results / study.name
    _check_commit()
    _check_writable(folder)
    rows = StudyRecord(study, folder).rows()
    try:
        _check_experiments(study, overrides)
    except NormLabError as error:
        raise NormLabError(f"{study.name}: {error}" if study.name not in str(error) else str(error)) from None
    return f"{counted(sum(map(len, rows.values())), 'row') if rows else 'no rows yet'} in {folder}"


def _check_commit() -> None:
    if is_unnamed_copy():
        raise NormLabError(
            "the commit of this copy of NormLab is not known, and rows would not say which code made them; "
            "set NORMLAB_COMMIT to it (git rev-parse --short HEAD)"
        )


def _check_writable(folder: Path) -> None:
    """Raise if results cannot be stored: in the folder, its arms, their rows, or where the folder is to be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NormLabError(f"{there} is a file where results were to be stored; choose another folder for --results")
    for path in (there, *folder.glob("*"), *folder.glob("*/rows.jsonl")):
        if not os.access(path, os.W_OK):
            raise NormLabError(f"{path} cannot be written to; check its permissions, or choose another --results")


def _check_experiments(study: Study, overrides: Mapping[str, Any] | None) -> None:
    if study.kind not in ("train", "ladder", "rows"):
        study_items(study)
    check_rules(study, comparison_configs(study, overrides) or ladder_configs(study, overrides))
    for base, models in _experiments(study, overrides):
        for model in models:
            model.check_start()
        base.task_object.check_sources(base)
        found = pick_device(base.device)
        if study.gpu_minutes and base.device == "auto" and found.type == "cpu":
            raise NormLabError(
                f"torch sees no GPU here, and about {study.gpu_minutes:g} minutes of one are planned; look at normlab "
                f"doctor, or run on the CPU: --device cpu"
            )


def _experiments(
    study: Study, overrides: Mapping[str, Any] | None
) -> Iterator[tuple[TrainConfig, list[TransformerConfig]]]:
    """What the runs of every arm share, and all their models."""
    for config in comparison_configs(study, overrides).values():
        yield config.base, [*config.models.values()]
    for ladder in ladder_configs(study, overrides).values():
        yield ladder.base, [model for models in ladder.models.values() for model in models.values()]
