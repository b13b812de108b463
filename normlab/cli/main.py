"""The command line: parse, call, print. Nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tyro

from normlab import __version__
from normlab.cli import flags
from normlab.cli.bench import bench, bench_kernels, bench_step
from normlab.cli.check import check
from normlab.cli.compare import compare, report
from normlab.cli.doctor import doctor
from normlab.cli.schemes import schemes
from normlab.cli.simulate import simulate
from normlab.cli.study import study
from normlab.cli.subcommands import for_task, refuse_empty_paths, verb_kinds
from normlab.cli.train import export, generate, train
from normlab.compare.config import CompareConfig
from normlab.dynamics.experiments import EXPERIMENTS
from normlab.errors import NormLabError, unknown
from normlab.train.config import DEFAULT_TASK, TrainConfig
from normlab.train.tasks import find_task
from normlab.utils.settings import blamed

_DESCRIPTION = """Choose, check, train and understand how the layers of a Transformer are normalised.

Examples:
  normlab schemes                   the table of all schemes
  normlab schemes geonorm           everything about one
  normlab schemes "peri(step=0.1)"  the same, with options
  normlab train --scheme peri       one run on the built-in text, resumable
  normlab compare                   pre, post, peri and geonorm side by side, ending in a page
  normlab check peri                will it explode, vanish or collapse when it is deep?
  normlab simulate --scheme peri    what theory says it does to tokens through depth
  normlab report DIR                the page of a comparison or a run
  normlab study                     published claims, and what our runs say of them
  normlab generate --run DIR        text from a trained model
  normlab export RUN DIR            a trained model as a Hugging Face folder
  normlab doctor                    what this machine can run, and why not
  normlab bench kernels             fused steps against the memory's speed
  normlab bench step                training steps of every scheme beside Pre-Norm's
"""


_VERBS: dict[str, Callable[..., None]] = {
    "schemes": schemes,
    "train": train,
    "compare": compare,
    "check": check,
    "simulate": simulate,
    "study": study,
    "report": report,
    "generate": generate,
    "export": export,
    "doctor": doctor,
    "bench": bench,
}
_BENCHES: dict[str, Callable[..., None]] = {"kernels": bench_kernels, "step": bench_step}
# What a TOML file may set for a verb, besides the fields of the task's model.
_SETTINGS: dict[str, tuple[type, ...]] = {"train": (TrainConfig,), "compare": (CompareConfig, TrainConfig)}


def main() -> None:
    """Entry point of the `normlab` command. Bad input: one line, exit code 2."""
    words = sys.argv[1:]
    if words in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    try:
        _run(words)
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("normlab: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


def _run(words: list[str]) -> None:
    file: str | None = None
    stored: TrainConfig | None = None
    given: list[str] = []
    refuse_empty_paths(words, {**_BENCHES, **_VERBS})
    verbs, prog, description, task = _VERBS, "normlab", _DESCRIPTION, find_task(DEFAULT_TASK)
    if words[:1] == ["bench"]:
        verbs, prog, description, words = _BENCHES, "normlab bench", bench.__doc__ or "", words[1:]
    elif words[:1] and words[0] in _SETTINGS:
        file, given = flags.value_of(words, "--toml"), words[1:]
        stored = _stored(flags.value_of(given, "--resume")) if words[0] == "train" else None
        default_task = DEFAULT_TASK if stored is None else stored.task
        rest, task = flags.expand(given, _SETTINGS[words[0]], verb_kinds(_VERBS[words[0]]), default_task)
        words = [words[0], *rest]
    elif words[:1] == ["simulate"]:
        named = next((EXPERIMENTS[word] for word in words if word in EXPERIMENTS), None)
        verbs = {**_VERBS, "simulate": partial(simulate, config=named.defaults)} if named else _VERBS
    if words and not words[0].startswith("-") and words[0] not in verbs:
        raise unknown("benchmark" if verbs is _BENCHES else "verb", words[0], verbs)
    typed = {name: for_task(verb, task, stored) if name in _SETTINGS else verb for name, verb in verbs.items()}
    refuse_empty_paths(words, verbs)
    with blamed(file, given):
        act = tyro.extras.subcommand_cli_from_dict(
            typed, prog=prog, description=description, args=words, config=(tyro.conf.OmitArgPrefixes,)
        )
    if act is not None:
        act()


def _stored(folder: str | None) -> TrainConfig | None:
    """The configuration of the run that is to be resumed."""
    if folder is None:
        return None
    from normlab.train.storage.folder import RunFolder

    return RunFolder(Path(folder)).config


if __name__ == "__main__":
    main()
