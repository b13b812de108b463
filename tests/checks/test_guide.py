"""The guide's cards are what the checks say today: all words of them, the numbers aside."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import normlab
from normlab.checks.judge.fail_on import VERDICTS
from normlab.checks.judge.remedies import MENU
from tests.checks.reports import report

ROOT = Path(__file__).parents[2]


def _cards():
    found = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "cards.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


cards = _cards()
PAGE = cards.GUIDE.read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", list(cards.CARDS))
def test_a_card_says_what_the_check_says(name, monkeypatch):
    monkeypatch.setattr(normlab, "check", lambda scheme, max_seconds: report(scheme, None, 1))
    shown, now = cards.between(name, PAGE), cards.fenced(cards.CARDS[name]())
    assert cards.worded(shown) == cards.worded(now), "run python docs/cards.py"


def test_the_card_names_verdicts_and_remedies_that_there_are():
    card = cards.between("post", PAGE)
    # Names stand in a column as wide as the longest of them.
    width = max(map(len, VERDICTS))
    rows = {line[2 : 2 + width].strip() for line in card.splitlines() if re.match(r"[✓!✗] [a-z]", line)}
    # Post keeps no length, so that nothing can drift, and has no streams to mix.
    assert rows == VERDICTS - {"norm drift", "mixing"}
    remedies = re.findall(r"^ \d\. (.+(?:\n {4}.+)*)", card, re.MULTILINE)
    assert remedies
    assert {" ".join(words.split()) for words in remedies} <= {remedy.words for remedy in MENU}


def test_the_table_of_verdicts_names_them_all():
    table = PAGE.partition("## Verdicts")[2].partition("\n\n")[2].partition("\n\n")[0]
    named = {name.strip() for row in table.splitlines()[2:] for name in row.split("|")[1].split(",")}
    assert named == VERDICTS


def test_words_are_compared_wherever_lines_break():
    one = "RMS ∝ L^0.75 at step\n 30 ▁▂█ 1.1 → 9.7e-08"
    other = "RMS ∝ L^-1.2 at\n step 12 ▅▅▅ 3 → 4"
    assert cards.worded(one) == cards.worded(other)
    assert cards.worded(one) != cards.worded(other.replace("RMS", "mean"))
