"""Run a study: a comparison or a ladder for each arm, other work items one by one, and imported rows.

Every study can be stopped and resumed by the same call: comparisons and ladders within a run, other work after the last
item.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.compare.config import CompareConfig
from normlab.compare.store import RESULT_FIELDS, Store
from normlab.errors import NormLabError, unknown
from normlab.ladders.config import LadderConfig
from normlab.studies.import_rows import import_rows
from normlab.studies.items import Item, run_item, study_items
from normlab.studies.record import StudyRecord
from normlab.studies.settings import comparison_config, ladder_config
from normlab.studies.study import RESULTS, Study
from normlab.studies.vocabulary import with_vocabulary
from normlab.train.storage.folder import now
from normlab.utils.locks import hold
from normlab.utils.text import counted

if TYPE_CHECKING:
    from normlab.compare.executor import RunExecutor


@dataclass(frozen=True)
class ArmPlan:
    """What one arm of a study would run."""

    arm: str
    what: str
    runs: int
    flops: float = 0.0
    tokens: int = 0
    lost_tokenizer: str | None = None
    """Tokenizer that is not here: FLOPs are a lower bound then, because its vocabulary is not counted."""


def run_study(
    study: Study,
    results: Path = RESULTS,
    *,
    minutes: float | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
    executor: RunExecutor | None = None,
) -> int:
    """Run what is left of a study, for at most `minutes`; return the number of runs left.

    `overrides` are settings that depend on the machine (data, tokenizer, workers) and are not part of the file. With an
    `executor` the comparisons of several studies use the same processes.
    """
    check_minutes(minutes)
    record = StudyRecord(study, results / study.name)
    configs, ladders = comparison_configs(study, overrides), ladder_configs(study, overrides)
    check_rules(study, configs or ladders)
    record.begin(_names(study), now())
    import_rows(record)
    end = time.monotonic() + 60.0 * minutes if minutes is not None else None
    if study.kind == "train":
        told = {"progress": progress, "command": command, "stamp": record.stamp}
        return _run_comparisons(record, configs, end, told, executor)
    if study.kind == "ladder":
        return _run_ladders(record, ladders, end, progress, command)
    return _run_items(record, end) if study.kind != "rows" else _store_progress(record, 0, 0)


def check_minutes(minutes: float | None) -> None:
    """Raise for a time limit that is none."""
    if minutes is not None and not minutes > 0.0:
        raise NormLabError(f"minutes must be positive, got {minutes}; leave it out to go on to the end")


def study_plan(study: Study, overrides: Mapping[str, Any] | None = None) -> list[ArmPlan]:
    """The runs of a study, by arm; nothing is started."""
    if study.kind == "train":
        return [_comparison_plan(arm, config) for arm, config in comparison_configs(study, overrides).items()]
    if study.kind == "ladder":
        return [_ladder_plan(arm, config) for arm, config in ladder_configs(study, overrides).items()]
    if study.kind == "rows":
        return [ArmPlan(name, "rows that are there", 0) for name in study.rows]
    return [ArmPlan(item.arm, f"{study.kind} {item.scheme}", 1) for item in study_items(study)]


def comparison_configs(study: Study, overrides: Mapping[str, Any] | None = None) -> dict[str, CompareConfig]:
    """The comparison of every arm of a study of training runs."""
    if study.kind != "train":
        return {}
    return {arm: comparison_config(*_of_arm(study, arm, overrides)) for arm in study.arms}


def ladder_configs(study: Study, overrides: Mapping[str, Any] | None = None) -> dict[str, LadderConfig]:
    """The ladder of every arm of a study of ladders."""
    if study.kind != "ladder":
        return {}
    return {arm: ladder_config(*_of_arm(study, arm, overrides)) for arm in study.arms}


def _of_arm(study: Study, arm: str, overrides: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    given = {name: value for name, value in (overrides or {}).items() if value}
    return {**study.settings_of(arm), **given}, f"{study.name}, {arm}"


def _comparison_plan(arm: str, config: CompareConfig) -> ArmPlan:
    sized = with_vocabulary(config)
    base, runs = (sized or config).base, config.plan().size([])
    flops = runs * base.tokens_in_all * base.model.flops_per_token(base.sequence)
    rates = f"{config.lrs} rates" if isinstance(config.lrs, str) else counted(len(config.lrs), "rate")
    what = f"{counted(len(config.names), 'scheme')}, {rates}, {counted(config.seeds, 'seed')}"
    return ArmPlan(arm, what, runs, float(flops), runs * base.tokens_in_all, _lost_tokenizer(sized, config))


def _ladder_plan(arm: str, config: LadderConfig) -> ArmPlan:
    """Runs of a ladder: trunks and branches, and the fewest of its learning-rate searches."""
    from normlab.ladders.plan import LadderPlan
    from normlab.ladders.rates import FoundRate

    sized = with_vocabulary(config)
    plan = LadderPlan(sized or config)
    rates = {name: FoundRate(name, 1e-3) for name in config.names}
    judged = [run for rung in plan.config.rungs for run in plan.judged(rung, rates)]
    searches = plan.rates.runs([])
    what = f"{len(config.names)} schemes, {len(config.rungs)} sizes, {config.seeds} seeds"
    if searches:
        what += f", and {len(searches)} runs that begin the search for rates"
    tokens = sum(round(run.work / run.flops_per_token) for run in judged)
    flops = float(sum(run.work for run in judged))
    return ArmPlan(arm, what, len(judged), flops, tokens, _lost_tokenizer(sized, config))


def _lost_tokenizer(sized: CompareConfig | LadderConfig | None, config: CompareConfig | LadderConfig) -> str | None:
    return None if sized is not None else getattr(config.base, "tokenizer", None)


def check_rules(study: Study, configs: Mapping[str, CompareConfig | LadderConfig]) -> None:
    """Raise if a rule names a scheme that is not run: its claim would stay open."""
    if not configs or study.rows:
        return
    run = {name for config in configs.values() for name in config.names}
    for claim in study.claims:
        for scheme in claim.rule.schemes:
            if _canonical(scheme.partition("@")[0]) not in run:
                raise unknown(f"scheme in the rule of {claim.name}, among those that run", scheme, run)


def _names(study: Study) -> dict[str, str]:
    """Registry name of every scheme in a rule, so that verdicts do not import the registry."""
    written = {scheme.partition("@")[0] for claim in study.claims for scheme in claim.rule.schemes}
    return {name: _canonical(name) for name in sorted(written)} if study.kind in ("train", "ladder", "rows") else {}


def _canonical(name: str) -> str:
    from normlab.schemes.catalog.registry import scheme

    try:
        return str(scheme(name))
    except NormLabError:
        return name


def _run_comparisons(
    record: StudyRecord,
    configs: Mapping[str, CompareConfig],
    end: float | None,
    told: Mapping[str, Any],
    executor: RunExecutor | None,
) -> int:
    from normlab.compare.comparison import compare
    from normlab.compare.executor import RunExecutor

    left = _store_runs_left(record, configs)
    with ExitStack() as stack:
        # One for all arms: most of them differ in what no compiled code depends on.
        shared = executor or stack.enter_context(closing(RunExecutor()))
        try:
            for arm, config in configs.items():
                minutes = minutes_until(end)
                if minutes is not None and minutes <= 0.0:
                    break
                compare(config, record.folder / arm, minutes=minutes, executor=shared, **told)
        finally:
            left = _store_runs_left(record, configs)
    return left


def minutes_until(end: float | None) -> float | None:
    """Minutes that are left until a time of the monotonic clock; None: no limit."""
    return None if end is None else (end - time.monotonic()) / 60.0


def _store_runs_left(record: StudyRecord, configs: Mapping[str, CompareConfig]) -> int:
    """Store how many runs there are and how many are left: before the first one, too, for a study that is killed."""
    stored = [(config.plan(), Store(record.folder / arm).rows()) for arm, config in configs.items()]
    left = sum(plan.left(rows) for plan, rows in stored)
    return _store_progress(record, sum(plan.size(rows) for plan, rows in stored), left)


def _run_ladders(
    record: StudyRecord,
    configs: Mapping[str, LadderConfig],
    end: float | None,
    progress: bool,
    command: Sequence[str],
) -> int:
    from normlab.ladders.ladder import run_ladder
    from normlab.ladders.outcome import outcome

    runs = {arm: _ladder_plan(arm, config).runs for arm, config in configs.items()}
    counts = {arm: (number, number) for arm, number in runs.items()}
    try:
        for arm, config in configs.items():
            minutes = minutes_until(end)
            if minutes is not None and minutes <= 0.0:
                break
            folder = record.folder / arm
            run_ladder(config, folder, minutes=minutes, progress=progress, command=command, stamp=record.stamp)
            found = outcome(config, folder)
            # While rates are searched for, the runs that depend on them are not known yet.
            left = counts[arm][0] if found.is_open else found.left
            counts[arm] = (max(counts[arm][0], left), left)
    finally:
        left = _store_progress(
            record, sum(runs for runs, _ in counts.values()), sum(left for _, left in counts.values())
        )
    return left


def _run_items(record: StudyRecord, end: float | None) -> int:
    work = study_items(record.study)
    with hold(record.folder / "lock"):
        _store_items_left(record, work)
        rows = record.rows()
        # What failed in an earlier call comes last: it may fail again, and take all the time.
        for item in sorted(work, key=lambda item: item.has_begun(rows.get(item.arm, []))):
            if end is not None and time.monotonic() > end:
                break
            if not item.is_done(rows.get(item.arm, [])):
                store = Store(record.folder / item.arm, fields=RESULT_FIELDS)
                # In one write: half an item would count as done.
                store.append_all([{**row, **record.stamp} for row in run_item(item)])
        return _store_items_left(record, work)


def _store_items_left(record: StudyRecord, work: Sequence[Item]) -> int:
    """Store how many items there are and how many are left; one that failed has ended, as a run of a comparison."""
    rows = record.rows()
    return _store_progress(record, len(work), sum(not item.has_begun(rows.get(item.arm, [])) for item in work))


def _store_progress(record: StudyRecord, runs: int, left: int) -> int:
    record.store_progress(runs, left)
    return left
