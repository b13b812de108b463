"""The page of `normlab watch`: an empty shell, whose script asks the server for runs."""

from __future__ import annotations

from pathlib import Path

from normlab.pages.page import render, section
from normlab.watch.profiles import MEASURES

_SECONDS = 2.0
"""Seconds between two requests of a page."""


def watch_page(root: Path) -> str:
    """The HTML of the page, without any run in it."""
    return render(
        f"Runs in {root}",
        [
            section("runs", "Runs", "watch/runs.html"),
            section("loss", "Loss", "watch/loss.html"),
            section("blocks", "Through the blocks", "watch/blocks.html", measures=MEASURES),
            section("alarms", "Alarms", "watch/alarms.html"),
        ],
        {"seconds": _SECONDS, "measures": MEASURES},
        styles=("watch/watch.css",),
        scripts=("watch/watch.js",),
        live=True,
    )
