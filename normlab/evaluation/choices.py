"""Multiple choice from JSON lines, without lm-evaluation-harness: the model's answer is the most likely end.

{"start": "the quick brown", "ends": [" fox", " horse"], "answer": 0, "document": "book 1"}, one question a line;
`document` is optional. The score is the harness's `acc` on the same questions, so that a machine without it can do.
"""

from __future__ import annotations

import dataclasses
import json
import math
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normlab.errors import NormLabError
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.groups import group_scores, grouped_mean
from normlab.evaluation.score import Score
from normlab.evaluation.subject import Subject
from normlab.evaluation.windows import Window, sums
from normlab.utils.files import digest, file_error

_RULE = 2
"""Which tokens of an end are scored. 1: those behind the start's own, so that an end merged with them was certain."""


class Question(NamedTuple):
    """A multiple-choice question: a start, its possible ends, and the index of the right one."""

    start: str
    ends: tuple[str, ...]
    answer: int
    document: str | None


class Choices:
    """The questions in a file."""

    kind = "choices"

    def __init__(self, path: str, config: EvaluationConfig):
        self._path, self._config = Path(path), config
        alike = {own for own in map(Path, config.choices) if own.stem == self._path.stem}
        # books/cloze.jsonl and news/cloze.jsonl: both would be "cloze".
        self.name = str(self._path) if len(alike) > 1 else self._path.stem
        self._questions = read_questions(self._path)[: config.limit]

    @cached_property
    def _fingerprint(self) -> str:
        return digest(self._path)[1]

    def facts(self, subject: Subject) -> Mapping[str, Any]:
        """What decides the score, besides the weights."""
        rule = {} if self._is_plain else {"rule": _RULE}
        return {"kind": self.kind, "questions": self._fingerprint, "limit": self._config.limit, **rule}

    @property
    def _is_plain(self) -> bool:
        """Whether every rule of scoring so far gives the same: no start ends in a space, and every end begins with one.

        No tokenizer of ours merges such an end with its start, so that keys of stored scores stay what they were.
        """
        return all(
            question.start == question.start.rstrip() and all(end[0].isspace() for end in question.ends)
            for question in self._questions
        )

    def evaluate(self, subject: Subject, *, progress: bool) -> list[Score]:
        """The share of questions whose right end is the most likely one."""
        sequences = [sequence for question in self._questions for sequence in _sequences(subject, question)]
        nats = iter(_nats(subject, sequences, self._config.batch))
        right = [
            float(np.argmin([next(nats) for _ in question.ends]) == question.answer) for question in self._questions
        ]
        return [self._score(right)]

    def _score(self, right: Sequence[float]) -> Score:
        count = len(right)
        stderr = float(np.std(right, ddof=1)) / math.sqrt(count) if count > 1 else None
        score = Score(task=self.name, metric="acc", value=float(np.mean(right)), stderr=stderr, samples=count)
        pairs = [(question.document, value) for question, value in zip(self._questions, right, strict=True)]
        if any(document is None for document, _ in pairs):
            return score
        groups = group_scores((str(document), value) for document, value in pairs)
        return dataclasses.replace(score, group_stderr=grouped_mean(groups).stderr, groups=groups)


class _Sequence(NamedTuple):
    """Tokens of a start and an end; those from `first` on are scored."""

    ids: Sequence[int]
    first: int


def read_questions(path: Path) -> list[Question]:
    """The questions in a file; raises for a line that is none."""
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise file_error("read", error, path) from None
    # Not splitlines of the text: JSON may hold other characters that end a line, such as U+2028, as they are.
    lines = content.split(b"\n")
    found = [_question(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise NormLabError(f"{path} holds no question; expected JSON lines with start, ends and answer")
    return found


def _question(where: str, line: bytes) -> Question:
    try:
        found: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NormLabError(f"{where}: byte {line[error.start]:#04x} is not UTF-8; convert the file to UTF-8") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_question(found):
        raise NormLabError(
            f'{where} is not a question; expected {{"start": "the quick", "ends": [" fox", " cat"], "answer": 0}}'
        )
    if any("\ud800" <= character <= "\udfff" for text in (found["start"], *found["ends"]) for character in text):
        raise NormLabError(f"{where} holds half a surrogate pair; expected whole characters")
    document = found.get("document")
    return Question(found["start"], tuple(found["ends"]), found["answer"], None if document is None else str(document))


def _is_question(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("start"), str):
        return False
    ends: Any = found.get("ends")
    if not isinstance(ends, list) or len(ends) < 2:
        return False
    answer: Any = found.get("answer")
    return all(isinstance(end, str) and end for end in ends) and type(answer) is int and answer in range(len(ends))


def _sequences(subject: Subject, question: Question) -> Iterator[_Sequence]:
    """One for each end. A start that is too long for the model loses its beginning."""
    words = subject.tokenizer
    # As in the harness, spaces after the start belong to the end: many tokenizers begin words with a space.
    size = len(words.encode(question.start.rstrip()))
    for end in question.ends:
        # Together, as in the harness: a merge may span the two. A text follows an end token, as in training.
        ids = [words.end, *words.encode(question.start + end).tolist()]
        # An end that is merged into the start's last token has no token of its own: without one it would be certain.
        first = min(size + 1, len(ids) - 1)
        dropped = max(0, len(ids) - subject.longest - 1)
        yield _Sequence(ids[dropped:], max(1, first - dropped))


def _nats(subject: Subject, sequences: Sequence[_Sequence], batch: int) -> list[float]:
    """-ln p of every end. Sequences of about one length share a batch, so that little is padding."""
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place].ids))
    chosen = [sequences[place] for place in order]
    offsets = np.cumsum([0, *(len(one.ids) for one in chosen)])
    places = [
        Window(int(offset), int(offset) + one.first - 1, int(offset) + len(one.ids) - 1)
        for offset, one in zip(offsets, chosen, strict=False)
    ]
    ids = np.fromiter(chain.from_iterable(one.ids for one in chosen), np.int64)
    nats = [part.nats for found in sums(subject.decoder, ids, places, batch=batch) for part in found]
    return [value for _, value in sorted(zip(order, nats, strict=True))]
