"""Write the cards that the guide to checking shows: `python docs/cards.py` runs the checks, which takes minutes.

Each card stands between `<!-- card: NAME -->` and `<!-- end -->`. Tests run the checks again and compare all but the
numbers (`worded`), so that a card that no longer looks like this fails there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import normlab
from normlab.checks.view.card import text
from normlab.checks.view.side_by_side import Against

GUIDE = Path(__file__).parent / "guides" / "checking.md"

_TIME = 3600.0
"""Seconds: a busy machine must not cut the ladders."""
_NUMBER = re.compile(r"[-−+]?\d[\d.]*(?:e[-+]?\d+)?|[▁▂▃▄▅▆▇█]+")


def post() -> str:
    return text(normlab.check("post", max_seconds=_TIME))


def peri_steps() -> str:
    """Two designs, without the profiles."""
    small, large = (normlab.check(name, max_seconds=_TIME) for name in ("peri(step=0.1)", "peri"))
    return text(Against(small, large)).partition("\n\n peri(step=0.1)\n")[0]


def coordinates() -> str:
    """With the rules for the width, and without one for the depth."""
    found = normlab.check_coordinates("pre", base_dim=64, widths=(64, 128, 256), depths=(4, 8, 16), max_seconds=_TIME)
    return found.table()


CARDS: dict[str, Callable[[], str]] = {"post": post, "peri-steps": peri_steps, "coordinates": coordinates}


def fenced(card: str) -> str:
    """A card as the guide shows it: without margins, and without the time it took on some machine."""
    lines = [line.removeprefix(" ").rstrip() for line in card.strip("\n").splitlines()]
    return "\n".join(["```", *(re.sub(r"(seeds?), [\d.]+ \w+$", r"\1", line) for line in lines), "```"])


def between(name: str, page: str) -> str:
    """What the guide shows of a card."""
    found = re.search(_frame(name), page, re.DOTALL)
    if found is None:
        raise SystemExit(f"{GUIDE.name} has no card {name!r}; expected <!-- card: {name} --> ... <!-- end -->")
    return found[2]


def worded(card: str) -> list[str]:
    """The words of a card, wherever lines break: numbers and curves differ from machine to machine."""
    return _NUMBER.sub("#", card).split()


def _frame(name: str) -> str:
    return rf"(<!-- card: {name} -->\n)(.*?)(\n<!-- end -->)"


def main() -> None:
    cards = {name: fenced(make()) for name, make in CARDS.items()}
    page = GUIDE.read_text()
    for name, card in cards.items():
        between(name, page)
        page = re.sub(_frame(name), lambda found, card=card: found[1] + card + found[3], page, flags=re.DOTALL)
    GUIDE.write_text(page)


if __name__ == "__main__":
    main()
