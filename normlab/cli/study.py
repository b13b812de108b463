"""The verb `normlab study`: parse, call, print. Importing it imports neither torch nor numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro


def study(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None,
    /,
    minutes: float | None = None,
    dry_run: bool = False,
    report: bool = False,
    studies: Path = Path("studies"),
    results: Path = Path("benchmarks/results/studies"),
    docs: Path = Path("docs/claims.md"),
    html: Path = Path("claims.html"),
    data: tuple[str, ...] = (),
    val_data: tuple[str, ...] = (),
    tokenizer: str | None = None,
    workers: int | None = None,
    device: str | None = None,
) -> None:
    """Test published claims: one TOML file says what is claimed, what is run, and by which rule the rows decide.

    Without a name: the list of studies with their verdicts. Run a study again to go on where it was.

    For instance:
      normlab study
      normlab study peri-step --dry-run
      normlab study peri-step --minutes 9 --data "books/*.jsonl.xz"
      normlab study --report

    Args:
        name: A study, or a TOML file.
        minutes: Stop after so long, to go on another time.
        dry_run: Print runs, cost and rules; start nothing.
        report: Write the table of all claims and its page, from the rows alone.
        studies: Folder of the TOML files.
        results: Folder of the rows, a folder for each study.
        docs: Where --report writes the table.
        html: Where --report writes the page.
        data: Where the study's data is on this machine; see normlab train --help.
        val_data: Where the data to evaluate on is.
        tokenizer: Where the tokenizer is.
        workers: Runs at a time.
        device: Where to train: cpu, cuda.
    """
    # Numpy and the templates are not for --help.
    from normlab.studies import command
    from normlab.studies.study import load_study

    places = {"data": list(data), "val_data": list(val_data), "tokenizer": tokenizer, "workers": workers}
    places |= {"device": device}
    if report:
        command.write_report(studies, results, docs, html)
    elif name is None:
        command.show_list(studies, results)
    elif dry_run:
        command.show_plan(load_study(name, studies), places)
    else:
        line = ["normlab", *sys.argv[1:]]
        if command.run(load_study(name, studies), results, minutes=minutes, places=places, command=line):
            sys.exit(130)
