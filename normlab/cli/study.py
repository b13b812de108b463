"""The command `normlab study`. Importing this does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro


def study(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME...]")] = (),
    /,
    minutes: float | None = None,
    dry_run: bool = False,
    report: bool = False,
    studies: Path = Path("studies"),
    results: Path = Path("benchmarks/results/studies"),
    docs: Path = Path("docs/claims.md"),
    html: Path = Path("claims.html"),
    data_dir: Path | None = None,
    data: tuple[str, ...] = (),
    val_data: tuple[str, ...] = (),
    val_sets: tuple[str, ...] = (),
    tokenizer: str | None = None,
    workers: int | None = None,
    device: str | None = None,
) -> None:
    """Reproduce published claims. A TOML file states the claim, the runs, and the decision rule.

    Without a name: list all studies with their verdicts. The same command again resumes an interrupted study. Several
    studies run one after the other and share the models that are compiled.

    For example:
      normlab study
      normlab study high-rates --dry-run
      normlab study high-rates --minutes 9 --data-dir texts
      normlab study high-rates depth-use --minutes 27 --data-dir texts
      normlab study --report
      normlab study attention-dynamics --report

    Args:
        names: Studies, or TOML files.
        minutes: Time limit of all together; the same command resumes later.
        dry_run: Print runs, cost and rules without running anything.
        report: Write the table of all claims and its page from the stored results; with names, instead a page of every
            arm of these studies, report.html beside its rows.
        studies: Folder of the TOML files.
        results: Folder of the results, with one folder per study.
        docs: Markdown file that --report writes.
        html: HTML file that --report writes.
        data_dir: Folder that the paths in the study are relative to; none: the current one. Rows of several machines
            belong together if only this differs.
        data: Other training data than the study's; see normlab train --help. Other data make other runs.
        val_data: Other validation data.
        val_sets: Other further validation sets, NAME=FILES.
        tokenizer: Another tokenizer.
        workers: Parallel runs.
        device: Device: cpu, cuda.
    """
    # Numpy and the templates are not for --help.
    from normlab.studies import command
    from normlab.studies.study import load_study

    overrides = {"data": list(data), "val_data": list(val_data), "tokenizer": tokenizer, "workers": workers}
    overrides |= {"device": device, "val_sets": list(val_sets)}
    found = [load_study(name, studies) for name in names]
    if report and not found:
        command.write_report(studies, results, docs, html)
    elif report:
        command.write_pages(found, results)
    elif not found:
        command.show_list(studies, results)
    else:
        line = ["normlab", *sys.argv[1:]]
        if dry_run:
            command.show_plans(found, overrides, data_dir, minutes=minutes)
        elif command.run(found, results, minutes=minutes, overrides=overrides, command=line, data_dir=data_dir):
            sys.exit(130)
