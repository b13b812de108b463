"""Pages of the arms of a study, made from stored rows alone: `normlab study NAME --report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.studies.record import StudyRecord
from normlab.studies.study import Study


def write_arm_pages(study: Study, results: Path) -> Iterator[Path]:
    """Write report.html to the folder of every arm that has results; yields their paths."""
    if study.kind not in _WRITERS:
        raise NormLabError(
            f"{study.name} is of kind {study.kind}, whose arms have no pages; try --report without a name"
        )
    folder = results / study.name
    rows = StudyRecord(study, folder).rows()
    if not rows:
        raise NormLabError(f"{study.name} has no rows in {folder}; run it first, or name --results")
    for arm, own in rows.items():
        if any(row["state"] == "done" for row in own):
            yield _WRITERS[study.kind](study, folder / arm, own)


def _comparison(_study: Study, folder: Path, _rows: Sequence[Mapping[str, Any]]) -> Path:
    from normlab.compare.report import build

    return build(folder)


def _ladder(_study: Study, folder: Path, _rows: Sequence[Mapping[str, Any]]) -> Path:
    from normlab.ladders.results import build

    return build(folder)


def _simulation(study: Study, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    from normlab.studies.view.stored_simulation import stored_result

    return stored_result(study, folder.name, rows).save(folder / "report.html")


_WRITERS = {"train": _comparison, "ladder": _ladder, "simulate": _simulation}
"""By kind of study."""
