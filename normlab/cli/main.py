"""Entry point of the `normlab` command: choose the command, parse its options, run it. Only running imports torch."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import normlab
from normlab import __version__
from normlab.cli.bench import bench, bench_grid, bench_kernels, bench_step
from normlab.cli.check import check
from normlab.cli.compare import compare, report
from normlab.cli.completion import completion
from normlab.cli.defaults import Defaults, refuse_empty_paths, refuse_no_values, value_of
from normlab.cli.doctor import doctor
from normlab.cli.eval import evaluate
from normlab.cli.ladder import check_table_options, ladder, ladder_table
from normlab.cli.output import reader_may_leave
from normlab.cli.parsing import parse
from normlab.cli.schemes import schemes
from normlab.cli.simulate import simulate
from normlab.cli.study import study
from normlab.cli.train import export, generate, train
from normlab.cli.watch import watch
from normlab.dynamics.experiments import EXPERIMENTS
from normlab.errors import NormLabError, unknown

_DESCRIPTION = """Train, compare, stress-test and simulate normalisation schemes of Transformers.

Examples:
  normlab schemes                   list all schemes
  normlab schemes geonorm           show one scheme in detail
  normlab schemes "peri(step=0.1)"  the same, with options
  normlab train --scheme peri       train on the built-in text; resumable
  normlab compare                   compare pre, post, peri and geonorm, with an HTML report
  normlab ladder --data "*.txt"     train schemes at several sizes and budgets: does the gain survive scale?
  normlab check peri                check a deep model for exploding, vanishing or collapsing activations
  normlab simulate --scheme peri    simulate tokens through depth and compare with theory
  normlab watch DIR                 local page of runs in progress: curves, profiles of the blocks, alarms
  normlab report DIR                HTML report of a comparison, a ladder or a run
  normlab study                     published claims and our reproductions
  normlab generate --run DIR        generate text with a trained model
  normlab eval RUN --bits book.txt  bits per byte of a text, or scores on tasks of lm-evaluation-harness
  normlab export RUN DIR            export a trained model to Hugging Face transformers
  normlab doctor                    what this machine can run, and what is missing for what
  normlab completion bash           script that completes verbs and options in a shell
  normlab bench kernels             benchmark fused kernels
  normlab bench step                benchmark training steps of every scheme
  normlab bench grid                benchmark many runs of small models on one GPU

normlab COMMAND --help has all options of a command, with more examples.
"""


def _deferred(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The command as a function that returns the call without making it: errors while parsing are input errors."""

    @functools.wraps(verb)
    def call(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(verb, *arguments, **options)

    return call


_VERBS = {
    verb.__name__: _deferred(verb)
    for verb in (
        *(schemes, train, compare, ladder, check, simulate, study),
        *(watch, report, generate, export, doctor, completion, bench),
    )
} | {"eval": _deferred(evaluate)}
_BENCHES = {"kernels": _deferred(bench_kernels), "step": _deferred(bench_step), "grid": _deferred(bench_grid)}


def main() -> None:
    """Run the command line in `sys.argv`. Input errors print one line and exit with code 2."""
    warnings.formatwarning = _in_one_line
    # Outside for output that cannot be written, inside because whoever reads an error may have left, too.
    with _errors_in_one_line(), reader_may_leave(), _errors_in_one_line():
        run(sys.argv[1:])


_with_place = warnings.formatwarning


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning: ours, which are about the user's files, without the line of code that gave it."""
    if category is UserWarning and Path(filename).is_relative_to(Path(normlab.__file__).parent):
        return f"normlab: {message}\n"
    return _with_place(message, category, filename, lineno, line)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Context manager: print an error of the input in one line, and end with its exit code."""
    try:
        yield
    except NormLabError as error:
        print(f"normlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("normlab: stopped", file=sys.stderr)
        sys.exit(130)


def run(words: list[str]) -> None:
    """Parse the words after `normlab` and do what they ask for."""
    if words in (["--version"], ["-V"]):
        print(f"normlab {__version__}")
        return
    verbs, prog, description = _VERBS, "normlab", _DESCRIPTION
    if words[:1] == ["bench"]:
        verbs, prog, description, words = _BENCHES, "normlab bench", bench.__doc__ or "", words[1:]
    name = next(iter(words), "-")
    if not name.startswith("-") and name not in verbs:
        raise unknown("benchmark" if verbs is _BENCHES else "verb", name, verbs)
    if name in verbs:
        refuse_empty_paths(verbs[name], words)
        refuse_no_values(get_type_hints(verbs[name]), words)
    options: dict[str, Any] = {"description": description}
    with ExitStack() as errors:
        if name == "ladder" and value_of(words, "--rows") is not None:
            check_table_options(words)
            verbs = {**verbs, name: _deferred(ladder_table)}
        elif name in ("train", "compare", "ladder"):
            defaults = Defaults(verbs[name], words[1:])
            errors.enter_context(defaults.blamed())
            verbs, options["registry"] = {**verbs, name: defaults.verb()}, defaults.registry()
        elif name == "simulate":
            named = next((EXPERIMENTS[word] for word in words if word in EXPERIMENTS), None)
            verbs = {**verbs, name: partial(verbs[name], config=named.defaults)} if named else verbs
        work = parse(verbs, words, prog, **options)
    work()


if __name__ == "__main__":
    main()
