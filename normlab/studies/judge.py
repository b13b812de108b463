"""Judge the claims of a study: apply each claim's rule to the result rows and return the findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from normlab.compare.mixed_settings import mixed_settings, unequal_settings
from normlab.errors import NormLabError
from normlab.pages.numbers import join_names
from normlab.studies.cells import by_cell
from normlab.studies.evidence import Evidence, Row
from normlab.studies.finding import Finding
from normlab.studies.record import StudyRecord
from normlab.studies.settling import settling_text
from normlab.studies.study import RESULTS, Claim, Study
from normlab.utils.text import counted


def judge_claims(study: Study, results: Path = RESULTS) -> dict[str, Finding]:
    """The finding on every claim, by name, from the rows alone; open where the rows cannot be read."""
    record = StudyRecord(study, results / study.name)
    try:
        rows = record.rows()
        if not rows:
            return {claim.name: Finding(verdict="not run") for claim in study.claims}
        evidence = Evidence(by_cell(rows), record.about.get("names"))
    except NormLabError as error:
        return {claim.name: Finding(verdict="open", notes=(str(error),)) for claim in study.claims}
    return {claim.name: _decide(claim, evidence, record) for claim in study.claims}


def _before_correction(claim: Claim, evidence: Evidence) -> list[str]:
    """What a corrected rule said as it was registered."""
    if claim.correction is None:
        return []
    try:
        found = claim.correction.registered.decide(evidence)
        before = f"says {found.verdict} ({found.ours or 'no number'})"
    except (NormLabError, KeyError) as error:
        before = f"cannot be decided ({error})"
    return [f"the rule was corrected after its runs, because {claim.correction.why}; as registered it {before}"]


def _decide(claim: Claim, evidence: Evidence, record: StudyRecord) -> Finding:
    left, runs = record.about.get("left"), record.about.get("runs")
    if left != 0:
        # An interval computed before all runs have ended does not have its nominal level.
        waiting = f"{left if left is not None else 'some'} of {runs or '?'} runs have not ended"
        return Finding(verdict="unfinished", notes=(waiting,))
    try:
        found = claim.rule.decide(evidence)
        found = replace(found, settling=settling_text(found, claim.rule.rows(evidence)))
        found = found.noting(_before_correction(claim, evidence))
    except NormLabError as error:
        found = Finding(verdict="open", notes=(str(error),))
    except KeyError as error:
        # Rows of other programs and versions lack fields; the claims of all other studies do not depend on them.
        found = Finding(verdict="open", notes=(f"a row has no field {error.args[0]!r}",))
    older = record.older(evidence.rows)
    notes = [f"{counted(older, 'row')} began before the rule was registered"] if older else []
    return found.noting([*_settings_notes(claim, evidence), *notes])


def _settings_notes(claim: Claim, evidence: Evidence) -> list[str]:
    """Settings that differ within an arm, and between sources whose rows the study has taken in."""
    try:
        rows = claim.rule.rows(evidence)
    except (NormLabError, KeyError):
        return []
    arms = {arm: mixed_settings(own) for arm, own in _grouped(rows, "arm").items()}
    notes = [f"{arm}: the rows differ in {join_names(names)}" for arm, names in arms.items() if names]
    between = unequal_settings(_grouped(rows, "from").values())
    return notes + ([f"the sources of the rows differ in {join_names(between)}"] if between else [])


def _grouped(rows: Sequence[Row], field: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get(field)), []).append(row)
    return found
