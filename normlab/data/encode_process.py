"""A process that tokenises: batches of text come in by a pipe, their tokens go out by another.

Threads of one process take turns: at making Python integers of the tokens, at the tokenizer's cache of words, and at
memory that the system maps for them. A process is started by name and not with `multiprocessing`, which would import
the user's script again and so need `if __name__ == "__main__"` there.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import IO, Any

from normlab.data.encoded import Encoded, encode_batch
from normlab.data.readers import TextChunk
from normlab.data.tokenizer import Tokenizer
from normlab.errors import NormLabError

_IDLE_SECONDS = 5.0
"""Seconds to wait for an idle process to end."""


class EncodeProcess:
    """Parent side of a process that tokenises; one thread uses it."""

    def __init__(self, tokenizer: Tokenizer):
        # Its own session: Ctrl-C is for the parent, which then closes the pipes.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._batches, self._answers = self._process.stdin, self._process.stdout
        self._tokenizer: Tokenizer | None = tokenizer

    def encode(self, batch: list[TextChunk]) -> Encoded:
        """The tokens of a batch; raises what parsing it raises."""
        try:
            if self._tokenizer is not None:
                _send(self._tokenizer, self._batches)
                self._tokenizer = None
            _send(batch, self._batches)
            answer = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            raise NormLabError(
                f"a process that tokenises ended with code {code}, perhaps because memory ran out; "
                "try again, with less beside it"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the process: it ends by itself when it has nothing more to read."""
        try:
            self._batches.close()
            self._process.wait(_IDLE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._answers.close()


def _send(value: Any, pipe: IO[bytes]) -> None:
    pickle.dump(value, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def serve(batches: IO[bytes], answers: IO[bytes]) -> None:
    """Tokenise batches until there are no more: first the tokenizer comes in, then the batches."""
    tokenizer = pickle.load(batches)
    while True:
        try:
            batch = pickle.load(batches)
        except EOFError:
            return
        try:
            answer: Encoded | Exception = encode_batch(batch, tokenizer)
        except Exception as error:
            answer = error
        _send(answer, answers)


def _main() -> None:
    # Whatever is printed must not come between the answers.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    # A parent that is gone closes the pipes: nobody waits for an answer.
    with suppress(EOFError, BrokenPipeError):
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
