"""Functions as sub-commands: their options, and the variants that fit a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from normlab.cli import flags
from normlab.errors import NormLabError
from normlab.train.config import TrainConfig
from normlab.train.tasks import Task

Verb = Callable[..., None]


def verb_kinds(verb: Verb) -> dict[str, Any]:
    """The options of a verb that are no configuration, with their types."""
    hints = get_type_hints(verb.func if isinstance(verb, partial) else verb)
    return {name: kind for name, kind in hints.items() if name not in ("config", "toml", "return")}


def refuse_empty_paths(words: Sequence[str], verbs: Mapping[str, Verb]) -> None:
    """Raise for a path that is empty text, as an unset variable of a shell leaves it: it would mean this folder."""
    named = next((verbs[word] for word in words[:2] if word in verbs), None)
    kinds = {} if named is None else {**verb_kinds(named), "toml": Path}
    for name in (name for name, kind in kinds.items() if kind is Path or Path in get_args(kind)):
        if flags.value_of(words, f"--{name}") == "":
            raise NormLabError(f'--{name} is empty; expected a path; leave it out for its default, or write "."')


def for_task(verb: Verb, task: Task, stored: TrainConfig | None = None) -> Callable[..., Any]:
    """The verb with the options of a task: its model's fields, and none in its help that it does not have.

    `stored` is a run whose values stand where no flag is given.
    Called, it returns the work and does not do it: an error before that is one of the settings.
    """

    def call(config: Any, **options: Any) -> Callable[[], None]:
        return partial(verb, flags.untyped(config), **options)

    hints, known = get_type_hints(verb, include_extras=True), inspect.signature(verb)
    kind = flags.typed(hints["config"], task, stored=stored)
    parameters = [known.parameters["config"].replace(annotation=kind), *list(known.parameters.values())[1:]]
    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__annotations__ = {**hints, "config": kind}
    call.__signature__ = known.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
