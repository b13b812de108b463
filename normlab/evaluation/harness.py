"""Tasks of lm-evaluation-harness: find them by name, evaluate a model on one, read the scores."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError, reason
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.groups import group_scores, grouped_mean
from normlab.evaluation.score import Score
from normlab.evaluation.subject import Subject
from normlab.evaluation.task_files import TaskFile, read_task_files
from normlab.utils.lazy import import_optional

_OUT_OF_REACH = ("ConnectionError", "ConnectError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectTimeout")
"""Exceptions of datasets, huggingface_hub and its HTTP clients where the hub cannot be reached."""
_RESAMPLES = 1000
"""Bootstrap samples for standard errors without a formula; the harness's 100,000 take minutes."""


class Task:
    """A task, a group or a tag."""

    kind = "task"

    def __init__(self, name: str, spec: str, files: Sequence[TaskFile], manager: Any, config: EvaluationConfig):
        self.name, self._spec, self._manager, self._config = name, spec, manager, config
        # Tasks of a file may use other files of the same call, a group for example.
        self._definition = sorted(file.fingerprint for file in files)
        self._group_by = {name: file.group_by for file in files if file.group_by for name in file.names}

    def facts(self, subject: Subject) -> Mapping[str, Any]:
        """What decides the scores, besides the weights."""
        about = {"kind": self.kind, "task": self.name, "limit": self._config.limit, "files": self._definition}
        return about | {"lm_eval": importlib.metadata.version("lm_eval")}

    def evaluate(self, subject: Subject, *, progress: bool) -> list[Score]:
        """Every metric of the task, and of each task of a group."""
        # As Any: decorators of the harness hide the signatures.
        harness = import_optional("lm_eval", "eval", "normlab eval --tasks")
        models = import_optional("lm_eval.models.huggingface", "eval", "normlab eval --tasks")
        model, tokenizer = subject.for_transformers()
        with _errors(self.name), _sandboxed(self._config.allow_code):
            lm = models.HFLM(
                pretrained=model, tokenizer=tokenizer, batch_size=self._config.batch, device=str(model.device)
            )
            found = harness.simple_evaluate(
                model=lm, tasks=[self._spec], task_manager=self._manager, limit=self._config.limit,
                bootstrap_iters=_RESAMPLES, log_samples=bool(self._group_by),
            )  # fmt: skip
        with _errors(self.name):
            return [_with_groups(score, found, self._group_by) for score in scores(found)]


def open_tasks(config: EvaluationConfig) -> list[Task]:
    """The tasks that are asked for; raises for one that is not known."""
    import_optional("lm_eval", "eval", "normlab eval --tasks")
    import_optional("transformers", "eval", "normlab eval --tasks")
    # It reports the seeds and every setting of every task.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = read_task_files(config.task_files, allow_code=config.allow_code) if config.task_files else []
    own = {name: file for file in files for name in file.names}
    names = list(dict.fromkeys(config.tasks or own))
    manager = _manager(config, include_defaults=any(name not in own for name in names))
    known = {*manager.all_tasks, *own}
    for name in names:
        if name not in known:
            raise _unknown(name, known)
    # The harness finds files in folders by name, and a file by its path.
    specs = {name: name if name in manager.all_tasks else str(file.path) for name, file in own.items()}
    return [Task(name, specs.get(name, name), files if name in own else (), manager, config) for name in names]


def scores(found: Mapping[str, Any]) -> list[Score]:
    """The scores in the harness's results: `acc,none` beside `acc_stderr,none`."""
    made: list[Score] = []
    for task, values in found["results"].items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            metric, comma, filtering = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = values.get(f"{metric}_stderr,{filtering}")
                name = metric if filtering == "none" else f"{metric} ({filtering})"
                stderr = float(error) if isinstance(error, (int, float)) else None
                made.append(Score(task=task, metric=name, value=float(value), stderr=stderr, samples=samples))
    return made


def _with_groups(score: Score, found: Mapping[str, Any], group_by: Mapping[str, str]) -> Score:
    """The score with its groups, if its task has some and the harness scores each question by itself."""
    field, logged = group_by.get(score.task), found.get("samples", {}).get(score.task, [])
    values = (
        [(str(one["doc"][field]), one.get(score.metric)) for one in logged if one["filter"] == "none"] if field else ()
    )
    if not values or not all(isinstance(value, (int, float)) for _, value in values):
        return score
    groups = group_scores((group, float(value)) for group, value in values)
    over = grouped_mean(groups)
    # Some metrics are no means of what the harness keeps of a question: a perplexity is the exponential of one.
    if not math.isclose(over.mean, score.value, rel_tol=1e-9, abs_tol=1e-12):
        return score
    return dataclasses.replace(score, group_stderr=over.stderr, groups=groups)


def _manager(config: EvaluationConfig, *, include_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    folders: list[str | Path] = [place for place in config.task_files if Path(place).is_dir()]
    return TaskManager(include_path=folders or None, include_defaults=include_defaults)


def _unknown(name: str, known: set[str]) -> NormLabError:
    # There are thousands: only the nearest are named.
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return NormLabError(f"unknown task {name!r}; {hint}all names: lm_eval ls tasks; tasks of your own: --task-files")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Errors of the harness and of what it downloads, in one line."""
    try:
        yield
    except NormLabError:
        raise
    except (Exception, SystemExit) as error:
        if any(type(cause).__name__ in _OUT_OF_REACH for cause in _causes(error)):
            raise NormLabError(
                f"task {name} needs data from the Hugging Face hub, which cannot be reached ({reason(error)}); "
                f"go online once, after which they are cached, or use --task-files with local data"
            ) from error
        raise NormLabError(f"task {name} failed ({reason(error)}); check its definition and its data") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _sandboxed(allow_code: bool) -> Iterator[None]:
    """Run Jinja templates of tasks in a sandbox: the harness's own environment gives them all of Python."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    harness = utils.env
    if not allow_code:
        utils.env = SandboxedEnvironment(undefined=harness.undefined, keep_trailing_newline=True)
        utils.env.filters.update(harness.filters)
    try:
        yield
    finally:
        utils.env = harness
