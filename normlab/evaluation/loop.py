"""`evaluate`: every run on every task and text; what is stored already is not evaluated again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from normlab.evaluation.bits import Text
from normlab.evaluation.choices import Choices
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.score import Score
from normlab.evaluation.store import Store, key_of
from normlab.evaluation.subject import Subject, open_subject
from normlab.utils.files import writable
from normlab.utils.locks import hold
from normlab.utils.versions import versions


class Question(Protocol):
    """What a model is scored on: a text, a file of questions, or a task of lm-evaluation-harness."""

    name: str

    def facts(self, subject: Subject) -> Mapping[str, Any]: ...

    def evaluate(self, subject: Subject, *, progress: bool) -> list[Score]: ...


def evaluate(
    config: EvaluationConfig, out: str | Path, *, command: Sequence[str] = (), progress: bool = True
) -> list[dict[str, Any]]:
    """Evaluate all, store each result in the JSON file `out` as it comes, and return the results asked for."""
    out = writable(out, ".json")
    subjects = [open_subject(path, config.device) for path in dict.fromkeys(config.runs)]
    with hold(out.with_name(f".{out.name}.lock")):
        store = Store(out)
        questions = open_questions(config)
        # Every key before the first evaluation: what is wrong with the last run is said at once.
        pairs = [(subject, question, question.facts(subject)) for subject in subjects for question in questions]
        rows: list[dict[str, Any]] = []
        for number, (subject, question, facts) in enumerate(pairs, start=1):
            said = f"[{number} of {len(pairs)}] {subject.path} on {question.name}" if progress else None
            rows.append(_row(store, subject, question, facts, list(command), said))
            if number == len(pairs) or pairs[number][0] is not subject:
                subject.forget()
    return rows


def open_questions(config: EvaluationConfig) -> list[Question]:
    """The texts, files of questions and tasks of an evaluation; raises for what is missing or not known."""
    texts = [Text(spec, config) for spec in dict.fromkeys(config.bits)]
    return [*texts, *(Choices(path, config) for path in dict.fromkeys(config.choices)), *_tasks(config)]


def _row(
    store: Store, subject: Subject, question: Question, facts: Mapping[str, Any], command: list[str], said: str | None
) -> dict[str, Any]:
    """The stored row of a pair, or a new one; `said` names the pair in the progress lines, None: no progress."""
    key = key_of(subject.identity, facts)
    row = store.get(key)
    if said is not None:
        print(said if row is None else f"{said}: done before", file=sys.stderr, flush=True)
    if row is not None:
        # The same weights, or the same questions, may have been evaluated under another name.
        return store.rename(key, question.name) | {"run": str(subject.path)}
    scores = question.evaluate(subject, progress=said is not None)
    about = {"run": str(subject.path), "weights": subject.identity, "task": question.name, "settings": dict(facts)}
    return store.add(key, scores, **about, command=command, versions=versions())


def _tasks(config: EvaluationConfig) -> Sequence[Question]:
    if not (config.tasks or config.task_files):
        return []
    # Only tasks need lm_eval.
    from normlab.evaluation.harness import open_tasks

    return open_tasks(config)
