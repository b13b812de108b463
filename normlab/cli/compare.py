"""The verbs on many runs: `normlab compare` and `report`. Importing them imports neither torch nor numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from normlab.compare.config import CompareConfig


def compare(
    config: CompareConfig,
    out: Path = Path("comparison"),
    preset: str | None = None,
    toml: Path | None = None,
    minutes: float | None = None,
) -> None:
    """Train several schemes under the same conditions and say which is best, and how sure that is.

    Each scheme's learning rate is searched on runs of their own; other seeds judge it. Run it again to go on.
    The exit code is 1 where runs failed or stayed interrupted, 130 where it was stopped before the end, else 0.

    For instance:
      normlab compare --schemes pre peri geonorm --lrs 3e-4 1e-3 3e-3 --seeds 5 --data book.txt --tokens 10M
      normlab compare --preset 125m --data "books/*.jsonl.xz" --tokens 33M --minutes 9
      normlab compare --task images --preset digits --images 60k --batch 64

    Args:
        config: The comparison.
        out: Folder of the comparison.
        preset: Size of the models (tiny, 125m, 350m, 1.3b; for images digits, vit-s, vit-b); other flags change it.
        toml: File with any of these settings; flags come after it.
        minutes: Stop after so long, to go on another time.
    """
    from normlab.compare.comparison import compare as run
    from normlab.compare.outcome import outcome
    from normlab.compare.report import build, terminal

    run(config, out, minutes=minutes, command=["normlab", *sys.argv[1:]])
    page, ended = build(out), outcome(config, out)
    print(*ended.lines, f"page: {page}", sep="\n")
    terminal.show(out)
    sys.exit(ended.exit_code)


def report(folder: Annotated[Path, tyro.conf.Positional], /, out: Path | None = None, markdown: bool = False) -> None:
    """Make the page of a comparison or of a single run.

    Args:
        folder: Made by normlab compare or normlab train.
        out: Where the page goes; without it report.html in the folder. With markdown, where the table goes.
        markdown: Print a table for a paper or a pull request instead.
    """
    from normlab.compare import report as reports
    from normlab.utils.files import save

    if not markdown:
        print(f"page: {reports.build(folder, out=out)}")
    elif out is None:
        print(reports.markdown(folder))
    else:
        print(f"table: {save(out, {'.md': lambda: reports.markdown(folder)})}")
