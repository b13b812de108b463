"""Results folder of a study, and the check that its rows were made under the study's current rule.

RESULTS/NAME/
study.json          the hash of the rule, when it was registered, how many runs are left
ARM/rows.jsonl      a row for every run, each with that hash (and ARM/compare.json, ARM/runs/ of a comparison)

Rows with another hash were made under another rule: they are kept on disk and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.compare.store import RESULT_FIELDS, Row, Store
from normlab.errors import NormLabError
from normlab.studies.study import Study
from normlab.utils.files import file_error, read_json, write_json
from normlab.utils.results_folder import LADDER


class VoidError(NormLabError):
    """The rows of a study were made under another rule."""


@dataclass(frozen=True)
class StudyRecord:
    """The results of one study."""

    study: Study
    folder: Path

    @property
    def about(self) -> dict[str, Any]:
        """Contents of study.json; empty before the study began."""
        path = self.folder / "study.json"
        return read_json(path) if path.is_file() else {}

    @property
    def stamp(self) -> dict[str, str]:
        """Fields added to every row: the name of the study and the hash of its rule."""
        return {"study": self.study.name, "rule": self.study.rule_hash}

    def begin(self, names: Mapping[str, str], now: str) -> None:
        """Register the rule before the first row; if there are rows, check that they were made under it."""
        # Imported late because it imports torch, which the list of studies does not need.
        from normlab.utils.versions import versions

        known = self.about
        if self.rows():
            known["names"] = {**known.get("names", {}), **names}
        else:
            known = {**self.stamp, "registered": now, "names": dict(names), "versions": versions()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error("make", error, self.folder) from error
        write_json(self.folder / "study.json", known)

    def store_progress(self, runs: int, left: int) -> None:
        """Store the number of runs left."""
        write_json(self.folder / "study.json", {**self.about, "runs": runs, "left": left})

    def rows(self) -> dict[str, list[Row]]:
        """The rows of every arm, each with its arm; raises if a rule has changed since they were made."""
        folders = sorted(path.parent for path in self.folder.glob("*/rows.jsonl"))
        rows = {path.name: [{**row, "arm": path.name} for row in Store(path, fields=RESULT_FIELDS).rows()]
                for path in folders}  # fmt: skip
        for arm, own in rows.items():
            _check_numbers(self.folder / arm / "rows.jsonl", own)
        other = [row for own in rows.values() for row in own if row.get("rule") != self.study.rule_hash]
        if other:
            raise VoidError(
                f"the rule of {self.study.name} has changed since {len(other)} rows in {self.folder} were made (hash "
                f"{other[0].get('rule')}, now {self.study.rule_hash}), so they are refused; put the rule back, or move "
                f"the folder away and run the study again"
            )
        return {arm: _without_past_errors(_counted(self.folder / arm, own)) for arm, own in rows.items() if own}

    def older(self, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
        """Number of rows that began before the rule was registered, which is weaker evidence."""
        since = str(self.about.get("registered", ""))
        return sum(str(row["started"]) < since for own in rows.values() for row in own)


def _check_numbers(path: Path, rows: Sequence[Row]) -> None:
    """Raise for a rate or a loss that is no number; rows of checks and simulations may lack them."""
    for row in rows:
        for name in ("lr", "value", "loss"):
            found = row.get(name)
            if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
                raise NormLabError(
                    f"{path}: {name} of {row['run']} must be a number or null, got {found!r}; restore the row, or "
                    "delete it and run again"
                )


def _counted(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """Rows less those of a ladder's runs at a rate that is no longer picked; its description names them."""
    path = folder / LADDER
    set_aside = read_json(path).get("design", {}).get("set_aside", []) if path.is_file() else []
    return [row for row in rows if row["run"] not in set_aside]


def _without_past_errors(rows: Sequence[Row]) -> list[Row]:
    """Rows less those of errors of items (checks, simulations, benchmarks) that were done in a later call."""
    done = {row["item"] for row in rows if "item" in row and not row.get("item_failed")}
    return [row for row in rows if not (row.get("item_failed") and row["item"] in done)]
