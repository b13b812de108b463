"""Remote: an object in a process of its own, whose methods the benchmark calls. Local: the same in this process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

from normlab.errors import NormLabError


class Local:
    """An object in this process, with the interface of `Remote`."""

    start_seconds = 0.0
    """Seconds that it took to start the process and make the object."""

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        self._object, self._answer = make(*arguments), None

    def ask(self, method: str, *arguments: Any) -> Self:
        """Call a method; `answer` returns its result."""
        self._answer = getattr(self._object, method)(*arguments)
        return self

    def answer(self) -> Any:
        return self._answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        return self.ask(method, *arguments).answer()

    def end(self) -> None:
        """Close the object and its process."""
        self._object.close()


class Remote(Local):
    """An object in a new process. Between `ask` and `answer` others can be asked: they work at the same time."""

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        spawn = multiprocessing.get_context("spawn")
        self._begin, self._seconds = time.time(), None
        self._line, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        # Not waited for: several processes start at the same time.
        self._process.start()
        theirs.close()

    @property
    def start_seconds(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Seconds until the object was made; waits for it."""
        if self._seconds is None:
            self._seconds = self.answer() - self._begin
        return self._seconds

    def ask(self, method: str, *arguments: Any) -> Self:
        self.start_seconds  # noqa: B018  # its answer comes first
        self._line.send((method, arguments))
        return self

    def answer(self) -> Any:
        try:
            result, error = self._line.recv()
        except (EOFError, ConnectionError):
            result, error = None, "its process died"
        if error is not None:
            raise NormLabError(f"a process of the benchmark failed: {error}")
        return result

    def end(self) -> None:
        self._line.close()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()


def _serve(line: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Main function of the process: make the object, then call its methods until the parent closes the pipe."""
    try:
        made = make(*arguments)
        line.send((time.time(), None))
        with suppress(EOFError, ConnectionError):
            while True:
                method, given = line.recv()
                line.send((getattr(made, method)(*given), None))
        made.close()
    except Exception as error:
        line.send((None, f"{type(error).__name__}: {error}".splitlines()[0]))
