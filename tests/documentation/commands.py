"""Commands that the documentation shows, and the smaller settings with which tests run them.

Imports neither torch nor pytest: `tests/documentation/install.py` runs the README's commands in a fresh environment.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

MODEL = {"--preset": None, "--depth": "2", "--dim": "32", "--heads": "2"}
RUN = MODEL | {"--batch": "4", "--evals": "1", "--saves": "0"}
TEXT = {"--tokens": "2k", "--length": "32", "--eval-tokens": "1k"}
RATES = {"--lrs": "1e-2", "--seeds": "1", "--workers": "1"}
CHECK = {"--depths": "2,4,6", "--steps": "2", "--start-size": "none"}
SIMULATE = {"--tokens": "8", "--dim": "3", "--time": "2"}
LADDER = {
    "--sizes": "1x16 2x16", "--budgets": "2k", "--head-width": "16", "--length": "32", "--batch": "4",
    "--warmup-steps": "2", "--lrs": "1e-2", "--seeds": "1", "--eval-tokens": "1k", "--evals": "1", "--saves": "0",
    "--schemes": "pre peri",
    "--rate-budgets": None, "--target": None, "--tokenizer": None, "--workers": "1",
}  # fmt: skip

NOT_RUN = {
    "study high-rates --minutes": "trains on books; tests/studies runs a study from beginning to end",
    "study high-rates depth-use": "trains on books; tests/studies runs several studies in one call",
    "eval runs/fox --tasks": "data from the hub; tests/evaluation/test_harness.py says so without a network",
    "eval runs/fox --task-files": "tests/evaluation/test_harness.py evaluates a task of its own",
    "watch": "serves until Ctrl-C; tests/watch runs it, with --once as well",
    "study --report": "tests/studies makes the report from rows of its own",
    "study attention-dynamics --report": "writes into the folder of rows; tests/studies makes these pages elsewhere",
}
"""Commands that are only parsed, by how they begin, with the reason."""

SPECIAL: dict[str, dict[str, str | None]] = {
    # Budgets that fit into each other: a branch decays over its last fifth.
    "--branches": RUN | TEXT | {"--tokens": "6k", "--branches": "2k 4k", "--warmup": "2"},
    "--branch-from runs/trunk --tokens 29.5M": {"--tokens": "2k"},
    "--branch-from runs/trunk --tokens 59M": {"--tokens": "4k"},
    "train --task images": {"--batch": "8", "--images": "32", "--evals": "1", "--saves": "0"} | MODEL,
    "compare --task images": {"--batch": "8", "--images": "32", "--evals": "1", "--saves": "0"} | MODEL | RATES,
    "--rows": {},
    "speed-laws": {"--tokens": "4", "--scheme": "post,pre"},
    "real-model": {},
    "check pre --coordinates": {"--widths": "32,64", "--depths": "4,8", "--steps": "2"},
    "check path/to/config.json": CHECK | {"--shrink": None},
    "check runs/": {"--steps": "2"},
    "--tokenizer bpe:": RUN | TEXT | {"--tokenizer": "bpe:300"},
    "--depth 32": RUN | TEXT | {"--base-depth": "2", "--base-dim": "32"},
    "--base-depth": RUN | TEXT | RATES | {"--base-depth": "2", "--base-dim": "32"},
}
"""Settings of commands that need others than their verb, by words that they contain; the first that fits."""

USUAL: dict[str, dict[str, str | None]] = {
    "train": RUN | TEXT,
    "compare": RUN | TEXT | RATES,
    "ladder": LADDER,
    "check": CHECK,
    "simulate": SIMULATE,
}


@dataclass(frozen=True)
class Command:
    """One `normlab ...` line of a page."""

    page: str
    words: tuple[str, ...]
    """Without `normlab`."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """The pages whose commands are tested; generated cards and the log of experiments are not instructions."""
    guides = sorted((ROOT / "docs" / "guides").glob("*.md"))
    return [ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "docs" / "concepts.md", *guides]


def commands(page: Path) -> list[Command]:
    """The page's `normlab` commands, in order, with lines that continue joined and comments dropped."""
    name = page.relative_to(ROOT).as_posix()
    return [
        Command(name, tuple(shlex.split(line, comments=True)[1:]))
        for line in _lines(page)
        if line.startswith("normlab ")
    ]


def blocks(page: Path, language: str = "") -> list[str]:
    """The code blocks of a page in a language; without one, those that name none: commands and their output."""
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def _lines(page: Path) -> Iterator[str]:
    for block in blocks(page):
        yield from block.replace("\\\n", " ").splitlines()


def with_options(words: tuple[str, ...], options: dict[str, str | None]) -> tuple[str, ...]:
    """The command with these options in place of its own; None takes an option away."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word in options
        if not dropping:
            kept.append(word)
    added = [part for flag, value in options.items() if value is not None for part in (flag, *value.split())]
    return (*kept, *added)


def reason_not_to_run(command: Command) -> str | None:
    line = " ".join(command.words)
    return next((reason for words, reason in NOT_RUN.items() if line.startswith(words)), None)


def smaller(command: Command) -> tuple[str, ...]:
    """The command's words with settings that take seconds."""
    line = " ".join(command.words)
    if "--help" in line:
        return command.words
    special = next((options for words, options in SPECIAL.items() if words in line), None)
    found = USUAL.get(command.words[0], {}) if special is None else special
    return with_options(_two_schemes(command.words), found)


def _two_schemes(words: tuple[str, ...]) -> tuple[str, ...]:
    """Of the schemes to compare the first and the last."""
    if "--schemes" not in words:
        return words
    first = words.index("--schemes") + 1
    named = list(itertools.takewhile(lambda word: not word.startswith("--"), words[first:]))
    return (*words[:first], *dict.fromkeys((named[0], named[-1])), *words[first + len(named) :])
