"""Import result rows of other experiments (comparison, ladder, benchmark) into a study, with the hash of its rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.compare.store import RESULT_FIELDS, Row, Store
from normlab.errors import NormLabError
from normlab.studies.record import StudyRecord
from normlab.utils.files import read_json
from normlab.utils.text import counted


def import_rows(record: StudyRecord) -> None:
    """Add the rows that the study lists and does not have yet."""
    # All of them or none: of rows that are half there, a verdict would be one on a part.
    found = [(name, list(_arms(Path(name), record.study.name))) for name in record.study.rows]
    for name, arms in found:
        for arm, rows in arms:
            store = Store(record.folder / arm, fields=RESULT_FIELDS)
            there = {row["run"] for row in store.rows()}
            for row in rows:
                if row["run"] not in there:
                    store.append({**row, "from": name, **record.stamp})


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
    for folder in found:
        arm = "-".join([source.name, *folder.relative_to(source).parts])
        yield arm, Store(folder, fields=RESULT_FIELDS).rows()


def _check_ended(source: Path, study: str) -> None:
    """Raise if the study whose folder or arm this is has runs left."""
    for path in (source / "study.json", source.parent / "study.json"):
        if path.is_file() and (left := read_json(path).get("left", 0)):
            raise NormLabError(
                f"{study} needs the rows in {source}, and {counted(left, 'run')} of {path.parent.name} have not ended; "
                f"end them first"
            )


def _of_file(path: Path) -> list[Row]:
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "date" not in found:
        raise NormLabError(f"{path} is not a file of normlab bench step --out; expected its date and rows")
    shared = {
        "versions": {name: str(found.get(name)) for name in ("normlab", "torch", "python")},
        "device": found.get("device"), "started": found["date"], "finished": found["date"],
    }  # fmt: skip
    return [{**benchmark_row(row), **shared} for row in found["rows"]]
