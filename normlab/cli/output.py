"""Standard output and error of a command, which may be closed early by the reader, as `| head` does."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from normlab.errors import NormLabError


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Context manager: when the reader closes the pipe, further output is dropped and the command runs to its end.

    It may have files to write yet, and its exit code says something (rich would end it with 1, as a failed check does).
    """
    with ExitStack() as stack:
        for stream, redirect in ((sys.stderr, redirect_stderr), (sys.stdout, redirect_stdout)):
            # `>&-` leaves a program without one.
            output = _Output(stack.enter_context(open(os.devnull, "w")) if stream is None else stream)
            stack.enter_context(redirect(cast(TextIO, output)))
            stack.callback(output.flush)
        yield


class _Output:
    """A text stream that raises no BrokenPipeError, and one line where it cannot be written to."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._writing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Python flushes what is left at its exit, too.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if error.errno != errno.EPIPE:
                raise NormLabError(f"cannot write to {self._stream.name}: {error.strerror}") from None
