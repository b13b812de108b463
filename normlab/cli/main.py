"""The command line: parse, call, print. Nothing here imports torch before a command runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import tyro

from normlab import __version__
from normlab.cli.bench import bench, bench_kernels, bench_step
from normlab.cli.check import check
from normlab.cli.compare import compare, report
from normlab.cli.defaults import Defaults, refuse_empty_paths
from normlab.cli.doctor import doctor
from normlab.cli.schemes import schemes
from normlab.cli.simulate import simulate
from normlab.cli.study import study
from normlab.cli.train import export, generate, train
from normlab.dynamics.experiments import EXPERIMENTS
from normlab.errors import NormLabError, unknown

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


def _deferred(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The verb as a function that returns the work and does not do it: errors up to there are errors of the input."""

    @functools.wraps(verb)
    def call(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(verb, *arguments, **options)

    return call


_VERBS = {
    verb.__name__: _deferred(verb)
    for verb in (schemes, train, compare, check, simulate, study, report, generate, export, doctor, bench)
}
_BENCHES = {"kernels": _deferred(bench_kernels), "step": _deferred(bench_step)}


def main() -> None:
    """Entry point of the `normlab` command. Bad input: one line, exit code 2."""
    words = sys.argv[1:]
    if words in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    try:
        run(words)
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("normlab: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


def run(words: list[str]) -> None:
    """Parse the words after `normlab` and do what they ask for."""
    verbs, prog, description = _VERBS, "normlab", _DESCRIPTION
    if words[:1] == ["bench"]:
        verbs, prog, description, words = _BENCHES, "normlab bench", bench.__doc__ or "", words[1:]
    name = next(iter(words), "-")
    if not name.startswith("-") and name not in verbs:
        raise unknown("benchmark" if verbs is _BENCHES else "verb", name, verbs)
    if name in verbs:
        refuse_empty_paths(verbs[name], words)
    options: dict[str, Any] = {"prog": prog, "description": description, "args": words}
    with ExitStack() as errors:
        if name in ("train", "compare"):
            defaults = Defaults(verbs[name], words[1:])
            errors.enter_context(defaults.blamed())
            verbs, options["registry"] = {**verbs, name: defaults.verb()}, defaults.registry()
        elif name == "simulate":
            named = next((EXPERIMENTS[word] for word in words if word in EXPERIMENTS), None)
            verbs = {**verbs, name: partial(verbs[name], config=named.defaults)} if named else verbs
        work = tyro.extras.subcommand_cli_from_dict(verbs, **options, config=(tyro.conf.OmitArgPrefixes,))
    work()


if __name__ == "__main__":
    main()
