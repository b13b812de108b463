"""The command `normlab watch`. Importing this does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def watch(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    port: int = 8765,
    once: bool = False,
    browser: Annotated[bool, tyro.conf.arg(name="open")] = False,
) -> None:
    """Watch runs in progress on a local page: loss curves, profiles of the blocks, alarms, and the state of each run.

    The page is served on 127.0.0.1, reads the files of the runs and changes nothing. The folder may be a mount, or a
    copy that is synchronised from another machine. Ctrl-C ends it; the runs go on.

    For example:
      normlab watch runs/peri
      normlab watch comparison --open
      normlab watch ladder --once

    Args:
        folder: Folder of a run, a comparison or a ladder, or one that holds some.
        port: Port of the page; 0 takes any free one.
        once: Print a table of the runs and end, for a terminal without a browser.
        browser: Open the page in the browser.
    """
    from normlab.watch.watcher import Watcher

    watcher = Watcher(folder)
    if once:
        from normlab.watch.terminal import print_lines

        print_lines(watcher.lines())
    else:
        from normlab.watch.server import serve

        serve(watcher, port, browser=browser)
