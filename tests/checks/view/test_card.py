"""The card on a terminal: the verdict first, readable without colour, at any width."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from normlab.checks.judge.verdict import Verdict
from normlab.checks.result import Check
from normlab.checks.view.card import show, sparks, text
from normlab.checks.view.summary import causes, caveats, fates, headline, meanings, sentence
from tests.checks import finished


def only(check: Check, *verdicts: Verdict) -> Check:
    """The check with these verdicts in place of its own of the same name."""
    kept = [next((new for new in verdicts if new.name == old.name), old) for old in check.verdicts]
    extra = [new for new in verdicts if new.name not in {old.name for old in kept}]
    return dataclasses.replace(check, verdicts=(*kept, *extra))


def failing(name: str, finding: str, *layers: int) -> Verdict:
    return Verdict(name=name, finding=finding, level="fail", layers=layers, words=f"{finding}: 7 (1 is the limit)")


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ([failing("forward", "exploding", 17)], "Will explode when deep: block 17"),
        ([failing("forward", "exploding", *range(24))], "Will explode when deep"),
        (
            [
                failing("backward", "vanishing"),
                failing("unsteady", "unsteady"),
                failing("collapse", "collapse", 22, 23),
            ],
            "Will lose its gradient and collapse its tokens into one when deep: blocks 22-23",
        ),
        ([failing("unsteady", "unsteady")], "Will upset its gradient within a few steps when deep"),
        (
            [failing("certificate", "violated", 3)],
            "A proven bound is violated, by a fault in the model or in the bound: block 3",
        ),
        ([], "Stable at 24 blocks"),
    ],
)
def test_the_headline_is_plain(verdicts: list[Verdict], words: str) -> None:
    assert headline(only(finished.check(), *verdicts)) == words


def test_a_finding_that_explains_another_is_told_under_the_headline() -> None:
    scores = failing("attention logits", "large logits", 3)
    alone = only(finished.check(), scores)
    both = only(finished.check(), scores, failing("backward", "exploding"))
    assert causes(alone) == []
    (words,) = causes(both)
    assert "A query-key norm bounds both." in words
    lines = text(both).splitlines()
    place = next(number for number, line in enumerate(lines) if "Will blow up its gradient" in line)
    assert "The gradient grows because attention scores do" in lines[place + 1]
    assert words in meanings(both)


def test_warnings_and_unjudged_growth_are_said() -> None:
    warned = only(finished.check(), Verdict(name="dead depth", finding="dead depth", level="warn"))
    assert headline(warned) == "Stable at 24 blocks, but dead depth"
    alone = finished.check(finished.ladder((24,)))
    assert headline(alone) == "No alarm at 24 blocks"
    assert any("two depths" in line for line in caveats(alone))
    assert sentence(alone) == "pre: no alarm at 24 blocks"
    assert sentence(finished.check()) == "pre is stable at 24 blocks"
    assert sentence(finished.exploding()).startswith("none will blow up its gradient")


def test_an_unknown_failure_still_has_words() -> None:
    assert fates([failing("something new", "odd")]) == ["fail (odd)"]


def test_the_card_leads_with_what_was_changed_and_what_was_found() -> None:
    note = "width 4096 -> 256, vocabulary 32000 -> 1024 (--shrink 16)"
    lines = finished.exploding(notes_of_target=(note,), notes=("48 blocks left out",)).table().splitlines()
    assert lines[0].split()[0] == "none"
    assert note in lines[1]
    assert "48 blocks left out" in lines[2]
    assert lines[4].strip().startswith("✗ Will blow up its gradient when deep")
    marked = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in "✗!✓"][1:]
    assert marked == sorted(marked, key="✗!✓".index)


def test_numbers_stand_beside_their_thresholds_and_remedies_come_last() -> None:
    card = finished.collapsing().table()
    assert "0.999 (0.95 is the limit)" in card
    assert "gradient of the first block over the last's 1e-07" in " ".join(card.split())
    assert card.index("To try, cheapest first") > card.index("hidden size")
    assert "1. a longer warm-up" in card


@pytest.mark.parametrize("width", [40, 60, 83, 84, 110, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for check in (finished.exploding(), finished.check(name="x" * 300)):
        assert max(map(len, text(check, width).splitlines())) <= width


def test_text_from_users_is_not_markup() -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    show(finished.check(name=finished.HOSTILE, notes=("[red]x[/red]",)), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]y[/bold]" in shown
    assert "[red]x[/red]" in shown


def test_sparks_share_one_scale() -> None:
    low, high = sparks([[1.0, 2.0], [2.0, 2.9]], 10)
    assert low[0] == "▁"
    assert high[1] == "█"
    assert low[1] == high[0]


def test_sparks_of_odd_curves() -> None:
    assert sparks([[None, 1.0, None]], 8) == ["·▅·"]
    assert sparks([[None, None]], 8) == ["··"]
    assert sparks([[3.0] * 4], 8) == ["▅▅▅▅"]
    # Ends are kept when a curve is cut, and six decades are drawn by their logarithm.
    assert sparks([[10.0**k for k in range(7)]], 7) == ["▁▂▃▅▆▇█"]
    (line,) = sparks([[math.exp(0.1 * k) for k in range(100)]], 12)
    assert (len(line), line[0], line[-1]) == (12, "▁", "█")
    assert sparks([[0.0, 1e-9, 1.0]], 3) == ["▁▁█"]


def test_a_model_that_blew_up_still_has_a_card() -> None:
    rungs = finished.ladder((12, 24))
    broken = dataclasses.replace(
        rungs.profiles[-1], rms=[math.nan] * 25, grad_h=[math.inf] * 25, loss=math.nan, nan_first="blocks.3 at step 7"
    )
    check = finished.check(dataclasses.replace(rungs, profiles=(*rungs.profiles[:-1], broken)))
    card = check.table()
    assert "Will explode" in card
    assert "blocks.3 at step 7" in card
    assert "not finite → not finite" in card
