"""Other people's code may raise anything: here it becomes one line that says who failed, how, and what to try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normlab.errors import NormLabError

_LONGEST = 300


@contextmanager
def in_one_line(what: str, advice: str) -> Iterator[None]:
    """Whatever is raised inside becomes `what (Error: its first line); advice`."""
    try:
        yield
    except NormLabError:
        raise
    # A model that is too large or calls sys.exit() is as wrong a target as one with a bug; Ctrl-C is not its doing.
    except (Exception, SystemExit) as error:
        raise NormLabError(f"{what} ({reason(error)}); {advice}") from error


def reason(error: BaseException) -> str:
    """An exception in a few words."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__
