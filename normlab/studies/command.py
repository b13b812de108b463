"""The `normlab study` command: list studies, show a plan with its cost, run a study, write the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.pages.numbers import format_count
from normlab.studies.judge import judge_claims
from normlab.studies.record import StudyRecord
from normlab.studies.study import Study, find_studies, load_study
from normlab.studies.view import report
from normlab.studies.view.arm_pages import write_arm_pages
from normlab.studies.view.claim_lines import MARKS
from normlab.studies.view.summary import verdict_counts
from normlab.utils.files import write_atomically
from normlab.utils.text import counted


def show_list(folder: Path, results: Path) -> None:
    """List every study with its status and cost, and the cost of those that have not ended."""
    _check_results(results)
    studies = [load_study(name, folder) for name in find_studies(folder)]
    for study in studies:
        print(f"{study.name:<24} {_state(study, results)}\n{'':<24} {study.title}; {cost_of(study)}")
    left = sum(study.gpu_minutes for study in studies if not _is_done(study, results))
    print(f"in all: {sum(study.gpu_minutes for study in studies):g} GPU minutes, {left:g} of them in studies not ended")


def cost_of(study: Study) -> str:
    """Runs and estimated GPU minutes, as text."""
    return f"{study.cost}; {f'about {study.gpu_minutes:g} GPU minutes' if study.gpu_minutes else 'no GPU'}"


def _is_done(study: Study, results: Path) -> bool:
    return StudyRecord(study, results / study.name).about.get("left") == 0


def _state(study: Study, results: Path) -> str:
    verdicts = verdict_counts(judge_claims(study, results).values())
    about = StudyRecord(study, results / study.name).about
    left = f"; {about['left']} of {about['runs']} runs left" if about.get("left") else ""
    return f"{counted(len(study.claims), 'claim')}: {verdicts}{left}"


def show_plans(
    studies: Sequence[Study],
    overrides: Mapping[str, Any],
    data_dir: Path | None = None,
    *,
    minutes: float | None = None,
) -> None:
    """Print runs and cost by arm, and the rules; nothing is started. Tokenizers are looked for in `data_dir`.

    `minutes` is checked as it would be for a run.
    """
    from normlab.studies.run import check_minutes

    check_minutes(minutes)
    with contextlib.chdir(_folder(data_dir)):
        for study in studies:
            _print_title(study, studies)
            _show_plan(study, overrides)


def _print_title(study: Study, studies: Sequence[Study]) -> None:
    if len(studies) > 1:
        print(f"{study.name}: {study.title}")


def _show_plan(study: Study, overrides: Mapping[str, Any]) -> None:
    from normlab.studies.run import study_plan

    arms = study_plan(study, overrides)
    for arm in arms:
        work = f", {format_count(arm.tokens)} tokens, {arm.flops:.2g} FLOPs" if arm.tokens else ""
        print(f"{arm.arm}: {arm.what}: {counted(arm.runs, 'run')}{work}")
    total = f", {sum(arm.flops for arm in arms):.2g} FLOPs" if any(arm.flops for arm in arms) else ""
    print(f"in all: {counted(sum(arm.runs for arm in arms), 'run')}{total}; {cost_of(study)}")
    for lost in dict.fromkeys(arm.lost_tokenizer for arm in arms if arm.lost_tokenizer):
        print(f"FLOPs are a lower bound: the vocabulary of {lost}, which is not here, is not counted; try --data-dir")
    for claim in study.claims:
        print(f"claim {claim.name}: {claim.claim}\n  holds if {claim.rule.sentence}")
        if claim.correction is not None:
            print(f"  the rule was corrected after its runs, because {claim.correction.why}")
        if claim.power:
            print(f"  could show: {claim.power}")


def run(
    studies: Sequence[Study],
    results: Path,
    *,
    minutes: float | None,
    overrides: Mapping[str, Any],
    command: Sequence[str],
    data_dir: Path | None = None,
) -> int:
    """Run what is left of the studies, one after the other, for at most `minutes` in all, and print the verdicts.

    What they need is looked for first, for all of them. Returns the number of runs left.
    """
    from normlab.compare.executor import RunExecutor
    from normlab.studies.preflight import check_ready
    from normlab.studies.run import check_minutes

    check_minutes(minutes)
    results = results.absolute()
    with contextlib.chdir(_folder(data_dir)):
        there = {study.name: check_ready(study, results, overrides) for study in studies}
    for name, rows in there.items():
        print(f"{name}: {rows}")
    end = None if minutes is None else time.monotonic() + 60.0 * minutes
    left = 0
    with contextlib.closing(RunExecutor()) as executor:
        told = {"overrides": overrides, "command": command, "executor": executor}
        for study in studies:
            _print_title(study, studies)
            left += _run_until(end, study, results, _folder(data_dir), told)
            _print_verdicts(study, results)
    if left:
        print(f"{counted(left, 'run')} left: the same command goes on")
    return left


def _run_until(end: float | None, study: Study, results: Path, data_dir: Path, told: Mapping[str, Any]) -> int:
    """Run what is left of a study, if there is time for it; return the number of runs left."""
    from normlab.studies.run import minutes_until, run_study, study_plan

    minutes = minutes_until(end)
    if minutes is not None and minutes <= 0.0:
        planned = sum(size.runs for size in study_plan(study, told["overrides"]))
        return StudyRecord(study, results / study.name).about.get("left", planned)
    # Paths are part of a run's name: read from their folder, they are the same on every machine.
    with contextlib.chdir(data_dir):
        return run_study(study, results, minutes=minutes, **told)


def _print_verdicts(study: Study, results: Path) -> None:
    for name, finding in judge_claims(study, results).items():
        print(f"{MARKS[finding.verdict]} {name}: {finding.verdict}" + (f"; {finding.ours}" if finding.ours else ""))
        for note in finding.notes:
            print(f"    {note}")


def _folder(data_dir: Path | None) -> Path:
    if data_dir is not None and not data_dir.is_dir():
        raise NormLabError(f"there is no folder {data_dir}; --data-dir is the folder that holds the study's data")
    return data_dir or Path()


def _check_results(results: Path) -> None:
    """Raise where no rows can be: every claim would be reported as not run. A folder may still be made."""
    if results.exists() and not results.is_dir():
        raise NormLabError(f"{results} is a file; --results is the folder that holds the rows of studies")


def write_report(folder: Path, results: Path, docs: Path, html: Path) -> None:
    """Write docs/claims.md and the page."""
    _check_results(results)
    found = report.claim_lines(folder, results)
    for path, text in ((docs, report.markdown(found)), (html, report.claims_page(found))):
        write_atomically(path, text.encode("utf-8", "replace"))
        print(f"{'page' if path.suffix == '.html' else 'table'}: {path}")


def write_pages(studies: Sequence[Study], results: Path) -> None:
    """Write a page of every arm of the studies."""
    _check_results(results)
    for study in studies:
        for path in write_arm_pages(study, results):
            print(f"page: {path}")
