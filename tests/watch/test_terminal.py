"""The table of runs at several widths: no word and no number is broken, and what has no room is named."""

from __future__ import annotations

import io
from dataclasses import astuple
from pathlib import Path

import pytest
from rich.console import Console

from normlab.watch.fitting import wrap
from normlab.watch.terminal import print_lines
from normlab.watch.watcher import Watcher
from tests.watch import made

LONG = "geonorm(step=0.5,clamp=1.0)-lr=1e-3-seed=12-tokens=118M"


def printed(root: Path, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    print_lines(Watcher(root).lines(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


@pytest.mark.parametrize(
    ("width", "absent"), [(80, ["left", "last line", "tokens/s", "scores"]), (120, []), (60, ["validation", "alarms"])]
)
def test_no_word_is_broken_and_what_has_no_room_is_named(tmp_path: Path, width: int, absent: list[str]) -> None:
    text = printed(made.zoo(tmp_path), width)
    assert max(map(len, text.splitlines()[: -3 - bool(absent)])) <= width
    words = {word for line in Watcher(tmp_path).lines() for word in " ".join(map(str, astuple(line))).split()}
    words |= {word for line in Watcher(tmp_path).lines() for word in line.status.words.split()}
    assert {word for row in cells(text) for cell in row for word in cell.split()} <= words
    assert all(name in text.partition("No room for:")[2] for name in absent)
    assert ("No room for:" in text) == bool(absent)


def test_a_row_has_two_lines_at_most(tmp_path: Path) -> None:
    rows = cells(printed(made.zoo(tmp_path), 80))
    assert len(rows) <= 2 * 6
    assert ["training", "training", "200 of 400", "1.6427", "1.9000", "none"] in rows


def test_a_long_name_is_broken_between_its_parts(tmp_path: Path) -> None:
    made.run(tmp_path / "runs" / LONG, [made.step(1)], state="running")
    made.run(tmp_path / "runs/pre-1", [made.step(1)], state="running")
    names = [row[0] for row in cells(printed(tmp_path, 80))]
    assert "".join(names) == f"{LONG}pre-1"
    assert wrap(LONG, 12).splitlines() == [
        "geonorm(step=0.5,", "clamp=1.0)-", "lr=1e-3-", "seed=12-", "tokens=118M",
    ]  # fmt: skip


def test_text_of_a_run_is_not_obeyed(tmp_path: Path) -> None:
    made.run(tmp_path / "a", [made.step(1)], state="failed", reason="\x1b[31mred")
    assert "\x1b" not in printed(tmp_path, 80)
