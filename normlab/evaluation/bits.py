"""Bits per byte of a text under a model: sliding windows, the run's own tokenizer, UTF-8 bytes of the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import TextColumn

from normlab.data import open_source
from normlab.errors import NormLabError
from normlab.evaluation.config import EvaluationConfig
from normlab.evaluation.score import Score
from normlab.evaluation.subject import Subject
from normlab.evaluation.windows import WindowSum, window_sums
from normlab.utils.progress import ProgressDisplay


class Text:
    """A text to measure bits per byte on, read as training data are."""

    kind = "bits"

    def __init__(self, spec: str, config: EvaluationConfig):
        self.name, self._config, self._source = spec, config, open_source(spec)

    @cached_property
    def _fingerprint(self) -> str:
        return self._source.fingerprint()

    def facts(self, subject: Subject) -> Mapping[str, Any]:
        """What decides the score, besides the weights."""
        length, stride = self._sizes(subject)
        return {"kind": self.kind, "text": self._fingerprint, "length": length, "stride": stride}

    def evaluate(self, subject: Subject, *, progress: bool) -> list[Score]:
        """Bits per byte over all documents."""
        sums: list[WindowSum] = []
        size = tokens = 0
        with _progress(self.name, progress) as say:
            for document in (found for chunk in self._source.chunks() for found in chunk.parse()):
                size += len(document.text.encode("utf-8"))
                for part in self._window_sums(subject, document.text):
                    sums += part
                    tokens += sum(window.tokens for window in part)
                    say(f"{self.name}: {tokens:,} tokens scored")
        return [bits_per_byte(self.name, sums, size)]

    def _window_sums(self, subject: Subject, text: str) -> Iterator[list[WindowSum]]:
        length, stride = self._sizes(subject)
        words = subject.tokenizer
        # A document follows the end token of another, as in training.
        ids = np.concatenate([np.array([words.end], words.dtype), words.encode(text)])
        return window_sums(subject.decoder, ids, length=length, stride=stride, batch=self._config.batch)

    def _sizes(self, subject: Subject) -> tuple[int, int]:
        length = self._config.length or subject.length
        if length > subject.longest:
            raise NormLabError(f"--length {length}: {subject.path} takes {subject.longest} tokens at most")
        stride = self._config.stride or max(1, length // 2)
        if stride > length:
            raise NormLabError(f"--stride {stride} would leave out tokens; expected at most the length, {length}")
        return length, stride


def bits_per_byte(name: str, sums: Sequence[WindowSum], size: int) -> Score:
    """Total bits over total bytes.

    The standard error is that of a ratio, with windows as clusters of tokens; neighbouring windows are taken as
    independent.
    """
    tokens = sum(part.tokens for part in sums)
    if not tokens:
        raise NormLabError(f"{name} holds no text; expected at least one character")
    nats = math.fsum(part.nats for part in sums)
    count, stderr = len(sums), None
    if count > 1:
        squares = math.fsum((part.nats - nats / tokens * part.tokens) ** 2 for part in sums)
        stderr = math.sqrt(count / (count - 1) * squares) / size / math.log(2)
    value = nats / size / math.log(2)
    return Score(task=name, metric="bits_per_byte", value=value, stderr=stderr, samples=count)


@contextmanager
def _progress(name: str, progress: bool) -> Iterator[Callable[[str], None]]:
    """Shows the newest line on a terminal, elsewhere one now and then."""
    display = ProgressDisplay(TextColumn("{task.description}"), progress=progress)
    bar = display.bar
    line = None if bar is None else bar.add_task(escape(name), total=None)

    def say(text: str) -> None:
        if bar is not None and line is not None:
            bar.update(line, description=escape(text))
        elif display.is_due:
            display.say(text)

    try:
        yield say
    finally:
        display.close()
