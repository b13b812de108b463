"""`normlab schemes`: the table of all schemes and the card of one, on the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normlab.schemes.catalog.card import Card
from normlab.schemes.catalog.cited_claims import CitedClaim, Role, cited_claims
from normlab.schemes.catalog.registry import list_schemes, scheme
from normlab.schemes.contract.needs import PLACES
from normlab.utils.records import to_plain

_CLAIMS: dict[Role, str] = {"subject": "Claims that were tested", "compared": "Claims on schemes compared with it"}


def schemes(*, as_json: bool = False) -> None:
    """Print a table with one row per scheme."""
    cards = [Card.of(scheme(name)) for name in list_schemes()]
    if as_json:
        print(json.dumps([facts(card) for card in cards], ensure_ascii=False, indent=2))
        return
    table = Table(title="Normalisation schemes", show_lines=False, pad_edge=False)
    table.add_column("scheme", style="bold", no_wrap=True)
    table.add_column("step")
    table.add_column("grows", no_wrap=True)
    table.add_column("moves", justify="right", no_wrap=True)
    table.add_column("options")
    for card in cards:
        growth = dict(card.growth).get("Forward", "not stated").partition(";")[0]
        own = ", ".join(option.name for option in card.options if option.name in type(card.scheme).__annotations__)
        moves = "{}+{}".format(*card.traffic) if card.traffic else "–"
        formula = card.sections.get("Formula", card.summary).partition("\n")[0]
        table.add_row(card.scheme.name, escape(formula), growth, moves, own)
    console = Console()
    console.print(table)
    console.print("grows: RMS of the state with depth, at worst, with weights of one size in all blocks.")
    console.print("moves: vectors a token and block, forward+backward.")
    console.print("normlab schemes NAME prints the card of one.")


def card(spec: str, *, as_json: bool = False) -> None:
    """Print the card of one scheme."""
    page = Card.of(scheme(spec))
    if as_json:
        print(json.dumps(facts(page), ensure_ascii=False, indent=2))
        return
    console = Console()
    console.print(f"[bold]{escape(page.title)}[/bold]  {escape(page.summary)}", highlight=False)
    others = f"; also: {', '.join(names_of(page))}" if names_of(page) else ""
    console.print(f"[dim]{escape(f'normlab.scheme({str(page.scheme)!r}){others}')}[/dim]\n", soft_wrap=True)
    for heading, text in rows(page):
        _section(console, heading, text)
    for role, claims in cited_claims(page.scheme.name).items():
        _columns(console, _CLAIMS[role], map(_claim, claims))
    _columns(console, "Options", ((o.name, _short(getattr(page.scheme, o.name)), o.help) for o in page.options))


def _columns(console: Console, heading: str, lines: Iterable[tuple[str, ...]]) -> None:
    console.print(f"\n[bold]{heading}[/bold]")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for first, *rest in lines:
        table.add_row(f"  {first}", *map(escape, rest))
    console.print(table)


def _claim(claim: CitedClaim) -> tuple[str, str]:
    return claim.mark, f"{claim.verdict}: {claim.claim} ({claim.study})"


def _section(console: Console, heading: str, text: str) -> None:
    first, *rest = text.splitlines() or [""]
    console.print(f"[bold]{heading:<12}[/bold]{escape(first)}", highlight=False, soft_wrap=True)
    for line in rest:
        console.print(" " * 12 + escape(line), highlight=False, soft_wrap=True)


def names_of(page: Card) -> list[str]:
    """Aliases and variants of a scheme, the latter with their options."""
    cls = type(page.scheme)
    return [*cls.aliases, *(f"{name} = {cls(**options)}" for name, options in cls.variants.items())]


def rows(page: Card) -> list[tuple[str, str]]:
    """(heading, text) of a card in order; also used by the documentation."""
    needs = "\n".join(f"{need.name}: {PLACES[need.name]}" for need in page.scheme.needs) or "nothing inside a sublayer"
    zero = "may start at zero" if page.scheme.zero_outputs else "must not start at zero (refused)"
    return [
        *page.sections.items(),
        ("Outputs", f"output projections {zero}"),
        ("Needs", needs),
        ("Parameters", f"{page.extra_params} beyond the sublayers' own"),
        ("Cost", page.cost),
        *page.growth,
        ("Certificate", page.certificate),
        ("Depth rule", f"{page.scheme.depth_transfer}: {page.scheme.depth_rule}"),
    ]


def facts(page: Card) -> dict[str, Any]:
    """A card as a dictionary for JSON."""
    return {
        "name": page.scheme.name,
        "title": page.title,
        "summary": page.summary,
        "aliases": names_of(page),
        **{heading.lower(): text for heading, text in rows(page)},
        "claims": to_plain(cited_claims(page.scheme.name)),
        "options": [{"name": o.name, "default": o.default, "help": o.help} for o in page.options],
    }


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
