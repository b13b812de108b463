"""Import result rows of other experiments (comparison, ladder, benchmark) into a study, with the hash of its rule."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.compare.report.results import load_results
from normlab.compare.report.unended import unended
from normlab.compare.store import RESULT_FIELDS, Row, Store
from normlab.errors import NormLabError
from normlab.ladders.description import read_description
from normlab.studies.record import StudyRecord
from normlab.studies.study import Study
from normlab.utils.files import read_json
from normlab.utils.results_folder import COMPARISON, LADDER
from normlab.utils.text import counted


def import_rows(record: StudyRecord) -> None:
    """Add the rows that the study lists and does not have yet, or has as they were before."""
    # All of them or none: of rows that are half there, a verdict would be one on a part.
    for arm, (name, rows) in _by_arm(record.study).items():
        store = Store(record.folder / arm, fields=RESULT_FIELDS)
        there = {row["run"]: json.dumps(row, sort_keys=True) for row in store.rows()}
        stamped = [{**row, "from": name, **record.stamp} for row in rows]
        # A run that was interrupted or had failed may have been repeated since: the last row of a run counts.
        changed = [row for row in stamped if there.get(row["run"]) != json.dumps(row, sort_keys=True)]
        if changed:
            store.append_all(changed)


def _by_arm(study: Study) -> dict[str, tuple[str, list[Row]]]:
    """Source and rows of every arm, the last row of every run; raises for two sources that make one arm."""
    found: dict[str, tuple[str, list[Row]]] = {}
    # A source that is named twice, as a/b and a/b/, is one.
    for name in {Path(name).resolve(): name for name in study.rows}.values():
        for arm, rows in _arms(Path(name), study.name):
            other, before = found.get(arm, (name, []))
            if other != name:
                raise NormLabError(
                    f"{study.name}: rows of {other} and of {name} would both be the arm {arm!r}, and be taken for runs "
                    "of one experiment; name the folders above them, or copy one under another name"
                )
            found[arm] = name, [*{row["run"]: row for row in (*before, *rows)}.values()]
    return found


def benchmark_row(row: Mapping[str, Any]) -> Row:
    """A row of `bench step`; its name includes the kernels if they are not the fused ones."""
    kernels = row.get("kernels", "triton")
    name = row["scheme"] if kernels == "triton" else f"{row['scheme']} ({kernels})"
    return {**row, "scheme": name, "run": name, "seed": 0, "state": "done", "reason": None}


def _arms(source: Path, study: str) -> Iterator[tuple[str, list[Row]]]:
    """Arm names with their rows: one for a folder with rows, one for each such subfolder, or a JSON file."""
    if source.suffix == ".json" and source.is_file():
        yield source.stem, _of_file(source)
        return
    _check_ended(source, study)
    folders = [path.parent for path in source.rglob("rows.jsonl")]
    # Folders of single runs have no rows of a comparison; what lies above the source does not matter.
    found = sorted(folder for folder in folders if "runs" not in folder.relative_to(source).parts)
    if not found:
        raise NormLabError(f"{study} needs the rows in {source}, which has no rows.jsonl; make them first")
    # The folder in which the command runs, or one above it, has a name, too.
    first = source.name if source.name not in ("", "..") else source.resolve().name
    for folder in found:
        _check_whole(folder, study)
        arm = "-".join([first, *folder.relative_to(source).parts])
        yield arm, Store(folder, fields=RESULT_FIELDS).rows()


def _check_ended(source: Path, study: str) -> None:
    """Raise if the study whose folder or arm this is has runs left."""
    for path in (source / "study.json", source.parent / "study.json"):
        if path.is_file() and (left := read_json(path).get("left", 0)):
            raise NormLabError(
                f"{study} needs the rows in {source}, and {counted(left, 'run')} of {path.parent.name} have not ended; "
                f"end them first"
            )


def _check_whole(folder: Path, study: str) -> None:
    """Raise if a comparison or a ladder has runs left: its verdict would be one on a part."""
    if left := _runs_left(folder):
        raise NormLabError(f"{study} needs the rows in {folder}, {left}; end it first: the same command goes on")


def _runs_left(folder: Path) -> str:
    """What a folder is and what of it has not ended; empty where nothing is left, or no plan is stored."""
    if (folder / COMPARISON).is_file() and (what := unended(load_results(folder))):
        return f"a comparison that has runs left ({what[0].lower()}{what[1:-1]})"
    if (folder / LADDER).is_file() and (left := read_description(folder).design.runs_left):
        return f"a ladder that has at least {counted(left, 'run')} left"
    return ""


def _of_file(path: Path) -> list[Row]:
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "date" not in found:
        raise NormLabError(f"{path} is not a file of normlab bench step --out; expected its date and rows")
    shared = {
        "versions": {name: str(found.get(name)) for name in ("normlab", "torch", "python")},
        "device": found.get("device"), "started": found["date"], "finished": found["date"],
    }  # fmt: skip
    return [{**benchmark_row(row), **shared} for row in found["rows"]]
