"""The command `normlab ladder`. Importing this does not import torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from normlab.errors import NormLabError
from normlab.ladders.config import LadderConfig


def ladder(
    config: LadderConfig,
    out: Path = Path("ladder"),
    toml: Path | None = None,
    minutes: float | None = None,
    dry_run: bool = False,
    rows: Path | None = None,
) -> None:
    """Train schemes at several sizes and budgets; say whether their gaps survive scale, with intervals.

    Learning rates are found at the smallest size and tested at a middle one; the largest size is forecast before it is
    trained; gaps at sizes too large to try (--target) get an interval or the reason why there is none.
    The same command again resumes an interrupted ladder.
    Exit code: 0 on success, 1 if runs failed or stayed interrupted, 130 if it was stopped before the end.

    For example:
      normlab ladder --schemes pre peri geonorm --data "books/*.jsonl.xz" --tokenizer bpe.json.xz
      normlab ladder --data "books/*.jsonl.xz" --target 16x1024:400M --dry-run
      normlab ladder --rows losses.csv --target 1.3B:26B

    Args:
        config: Configuration of the ladder.
        out: Folder of the ladder. With --rows the default is answer.
        toml: TOML file with any of these options; flags override it.
        minutes: Time limit; the same command resumes later.
        dry_run: Print runs, FLOPs, time, memory, and what the design could show at best; train nothing.
        rows: Table of losses (CSV: scheme, parameters, tokens, flops, seed, loss) to answer from; nothing is trained.
    """
    if config.tokens_per_parameter is not None and config.budgets != LadderConfig.budgets:
        named = ", ".join(f"{budget:,}" for budget in config.budgets)
        print(f"--tokens-per-parameter sets the budget of each size; --budgets {named} is not used", file=sys.stderr)
    # With --rows the command is `ladder_table`; here the option is only part of the help.
    if dry_run:
        _print_plan(config, minutes)
    else:
        _run(config, out, minutes)


def ladder_table(
    rows: Path,
    out: Path = Path("answer"),
    baseline: str | None = None,
    target: tuple[str, ...] = (),
    level: float = 0.95,
) -> None:
    """Answer from a table of losses that anyone's runs have filled; nothing is trained.

    For example:
      normlab ladder --rows losses.csv --target 1.3B:26B

    Args:
        rows: CSV file with the columns scheme, parameters, tokens, flops, seed and loss (in nats a token); size, steps,
            trunk, tokens_per_s, lr and state may be added.
        out: Folder of the page.
        baseline: Scheme that the others are compared with; none: pre if it is among them, else the first.
        target: Places at which the gap is asked for, parameters:tokens.
        level: Confidence level at any one cell or place, for all schemes together; over all cells at once it is less.
    """
    from normlab.compare.session import make_folder
    from normlab.ladders.report import terminal_lines
    from normlab.ladders.results import write_report
    from normlab.ladders.table import read_losses
    from normlab.utils.results_folder import TABLE

    losses = read_losses(rows, baseline=baseline, targets=target, level=level)
    content, folder = losses.report(), make_folder(out, TABLE)
    losses.store(folder)
    page = write_report(content, folder)
    print(*terminal_lines(content), f"page: {page}", sep="\n")


def check_table_options(words: Sequence[str]) -> None:
    """Raise for an option of a ladder that a table of losses does not have."""
    taken = [f"--{name}" for name in inspect.signature(ladder_table).parameters]
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        if flag not in (*taken, "--help"):
            raise NormLabError(
                f"--rows answers from a table and trains nothing, so it takes no {flag}; leave that out (its options "
                f"are {', '.join(taken)})"
            )


def _run(config: LadderConfig, out: Path, minutes: float | None) -> None:
    from normlab.ladders.ladder import run_ladder
    from normlab.ladders.outcome import outcome
    from normlab.ladders.report import terminal_lines
    from normlab.ladders.results import read_report, write_report

    run_ladder(config, out, minutes=minutes, command=["normlab", *sys.argv[1:]])
    content, ended = read_report(out), outcome(config, out)
    print(*ended.lines, *terminal_lines(content), f"page: {write_report(content, out)}", sep="\n")
    sys.exit(ended.exit_code)


def _print_plan(config: LadderConfig, minutes: float | None) -> None:
    from normlab.compare.session import check_call
    from normlab.ladders.dry_run import dry_run
    from normlab.ladders.ladder import open_data

    check_call(minutes)
    data, config = open_data(config, progress=True)
    print(*dry_run(config, data).lines(), sep="\n")
