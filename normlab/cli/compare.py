"""The commands for many runs: `normlab compare` and `report`. Importing this does not import torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from normlab.cli.eval import task_names
from normlab.compare.config import CompareConfig
from normlab.errors import NormLabError


def compare(
    config: CompareConfig,
    out: Path = Path("comparison"),
    preset: str | None = None,
    toml: Path | None = None,
    minutes: float | None = None,
    eval_tasks: Annotated[tuple[str, ...], tyro.conf.arg(name="eval")] = (),
    eval_files: tuple[Path, ...] = (),
    eval_choices: tuple[str, ...] = (),
    eval_bits: tuple[str, ...] = (),
    eval_limit: int | None = None,
) -> None:
    """Train several schemes under the same conditions; report differences with confidence intervals.

    The learning rate of each scheme is tuned first, with seeds that the final runs do not use.
    The same command again resumes an interrupted comparison.
    Exit code: 0 on success, 1 if runs failed or stayed interrupted, 130 if it was stopped before the end.

    For example:
      normlab compare --schemes pre peri geonorm --lrs 3e-4 1e-3 3e-3 --seeds 5 --data book.txt --tokens 10M
      normlab compare --preset 125m --data "books/*.jsonl.xz" --tokens 33M --minutes 9
      normlab compare --task images --preset digits --images 60k --batch 64

    Args:
        config: Configuration of the comparison.
        out: Folder of the comparison.
        preset: Model size: tiny, 125m, 350m, 1.3b; for images digits, vit-s, vit-b. Other flags override it.
        toml: TOML file with any of these options; flags override it.
        minutes: Time limit of the training; the same command resumes later.
        eval_tasks: Score the final runs on tasks of lm-evaluation-harness, separated by commas; see normlab eval.
        eval_files: YAML files of tasks of your own, or folders of some.
        eval_choices: Score the final runs on files of multiple-choice questions.
        eval_bits: Score the final runs in bits per byte of these texts.
        eval_limit: Questions of each task, the first ones; none: all.
    """
    from normlab.compare.comparison import compare as run
    from normlab.compare.comparison import left
    from normlab.compare.outcome import outcome
    from normlab.compare.report import build, terminal
    from normlab.compare.scores import check_scoring, score_judges
    from normlab.evaluation import EvaluationConfig

    command = ["normlab", *sys.argv[1:]]
    scoring = None
    if eval_tasks or eval_files or eval_choices or eval_bits:
        scoring = EvaluationConfig(
            runs=("those of the comparison",), tasks=task_names(eval_tasks), task_files=tuple(map(str, eval_files)),
            choices=eval_choices, bits=eval_bits, limit=eval_limit, device=config.base.device,
            # What was trained in such batches is evaluated in them, but large ones are no faster.
            batch=min(32, config.base.batch),
        )  # fmt: skip
        check_scoring(config, scoring)
    elif eval_limit is not None:
        raise NormLabError(
            "--eval-limit is the number of questions of --eval, --eval-files or --eval-choices, and there are none; "
            "name some, or leave it out"
        )
    run(config, out, minutes=minutes, command=command)
    # A comparison that is made in slices is scored after the last one.
    if scoring is not None and not left(config, out):
        with _page_if_stopped(out):
            score_judges(out, scoring, command=command)
    page, ended = build(out), outcome(config, out)
    print(*ended.lines, f"page: {page}", sep="\n")
    terminal.print_ranking(out)
    sys.exit(ended.exit_code)


@contextmanager
def _page_if_stopped(out: Path) -> Iterator[None]:
    """Context manager for the scoring: Ctrl-C writes the page of all runs with the scores so far, and ends with 130."""
    from normlab.compare.report import build
    from normlab.compare.scores import FILE

    try:
        yield
    except KeyboardInterrupt:
        print(f"page: {build(out)}")
        print(
            f"normlab: stopped while scoring; the page has all runs, and the scores that are in {out / FILE}; "
            "the same command goes on with the others",
            file=sys.stderr,
        )
        sys.exit(130)


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")],
    /,
    out: Path | None = None,
    markdown: bool = False,
) -> None:
    """Write the HTML report of a comparison, of a ladder or of a single run.

    For example:
      normlab report comparison
      normlab report runs/peri --markdown

    Args:
        folders: Folder made by normlab compare, normlab ladder or normlab train.
        out: File to write; none: report.html in the folder, or with --markdown standard output.
        markdown: Write a Markdown table instead, for a paper or a pull request.
    """
    from normlab.compare import report as reports
    from normlab.ladders import results
    from normlab.utils.files import save

    folder = _only(folders)
    of_ladder = results.is_ladder(folder)
    table = partial(results.markdown if of_ladder else reports.markdown, folder)
    if not markdown:
        print(f"page: {(results.build if of_ladder else reports.build)(folder, out=out)}")
    elif out is None:
        print(table())
    else:
        print(f"table: {save(out, {'.md': table})}")


def _only(folders: tuple[Path, ...]) -> Path:
    """The folder of a report; raises unless there is one, and says what to type for several."""
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise NormLabError("normlab report needs a folder made by normlab compare, ladder or train, and none is named")
    calls = "; ".join(f"normlab report {shlex.quote(str(folder))}" for folder in folders)
    raise NormLabError(f"normlab report takes one folder, got {len(folders)}; make a page of each: {calls}")
