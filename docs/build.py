"""Generate documentation from code: a page per scheme, the README's table, the modules of docs/architecture.md, the
matrix of conversions where the Hugging Face library is installed, and verdicts on claims from the rows of studies (in
docs/claims.md, the README, the page of each scheme and the claims that its card cites).

make docs          writes the files
build.py --check   says which are not current, and exits with 1 if any is
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import normlab
from normlab.schemes.catalog.card import Card
from normlab.schemes.catalog.cited_claims import FILE as CITED
from normlab.schemes.catalog.cited_claims import Role
from normlab.schemes.catalog.terminal import names_of, rows
from normlab.studies.view import citations, report, summary
from normlab.studies.view.claim_lines import ClaimLine
from normlab.utils.records import to_plain

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- schemes: begin (make docs) -->", "<!-- schemes: end -->"
HEADINGS = {
    "Init": "Initialisation", "Fails": "Where it fails", "Outputs": "Output projections",
    "Needs": "Needs inside a sublayer", "Cost": "Memory traffic", "Forward": "Growth of the state",
    "Backward": "Growth of the gradient", "Depth rule": "Learning rate over depth",
}  # fmt: skip
"""Names on a page for those of a card, which are short enough for a column of the terminal."""
DRAWN = ("Formula", "Placement")
"""Parts of a card that are shown as they are written, with a heading of their own; the others are rows of a table."""
FOUND, FOUND_END = "<!-- found: begin (make docs) -->", "<!-- found: end -->"


def cards() -> list[Card]:
    return [Card.of(normlab.scheme(name)) for name in normlab.list_schemes()]


def page(card: Card, cited: Mapping[Role, Sequence[str]]) -> str:
    """One scheme: the card in Markdown, then what is measured, tested and used of it."""
    import scheme_facts

    parts = [f"# {card.title}", f"`{card.scheme.name}`: {card.summary}"]
    if names := names_of(card):
        parts.append("Also known as: " + ", ".join(f"`{name}`" for name in names))
    found = rows(card)
    parts += [f"## {heading}\n\n```\n{text}\n```" for heading, text in found if heading in DRAWN]
    parts.append("## Properties\n\n" + _properties([row for row in found if row[0] not in DRAWN]))
    parts.append("## Options\n\n" + _options(card))
    parts += [f"## {heading}\n\n{text}" for heading, text in scheme_facts.sections(card.scheme, cited)]
    note = f"_Written by `make docs` from `normlab/schemes/{card.scheme.name}.py`; edit that file._"
    return "\n\n".join([*parts, note]) + "\n"


def _properties(facts: Sequence[tuple[str, str]]) -> str:
    """Lines that were broken for the terminal are one cell."""
    lines = ["| property | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {HEADINGS.get(name, name)} | {_cell(text)} |" for name, text in facts)])


def _options(card: Card) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{o.name}` | `{o.default!r}` | {_cell(o.help)} |" for o in card.options]
    return "\n".join(lines)


def table() -> str:
    """One row per scheme, for the README."""
    lines = ["| scheme | step | state grows with depth | with any weights | source |", "|---|---|---|---|---|"]
    for card in cards():
        name = card.scheme.name
        formula = card.sections["Formula"].splitlines()[0]
        growth = card.scheme.law(1).forward
        proven = "no" if card.certificate.startswith("none") else "yes"
        # Who and where; what follows is on the scheme's page.
        source = re.split(r"[;:]|\. (?=[A-Z])", _cell(card.sections["Source"]))[0]
        lines.append(f"| [`{name}`](docs/schemes/{name}.md) | {_code(formula)} | {growth} | {proven} | {source} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _code(text: str) -> str:
    """Code in a cell. GitHub reads an escaped bar between backticks as a bar, the site shows the backslash."""
    if "|" not in text:
        return f"`{_cell(text)}`"
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def claims() -> list[ClaimLine]:
    """Every claim with its verdict, from the stored rows."""
    with contextlib.chdir(ROOT):
        return report.claim_lines()


def scheme_pages(found: Sequence[ClaimLine]) -> dict[Path, str]:
    """The page of every scheme, and the claims that its card cites."""
    folder = ROOT / "docs" / "schemes"
    pages = {
        folder / f"{card.scheme.name}.md": page(card, citations.page_lines(found, card.scheme.name)) for card in cards()
    }
    return pages | {CITED: json.dumps(to_plain(citations.cited(found)), ensure_ascii=False, indent=1) + "\n"}


def documents() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    found = claims()
    pages = scheme_pages(found)
    readme = _with((ROOT / "README.md").read_text("utf-8"), BEGIN, table(), END)
    pages[ROOT / "README.md"] = _with(readme, FOUND, summary.found_table(found), FOUND_END)
    import packages

    architecture = ROOT / "docs" / "architecture.md"
    pages[architecture] = _with(architecture.read_text("utf-8"), packages.BEGIN, packages.modules(), packages.END)
    pages[ROOT / "docs" / "figures" / "packages.svg"] = packages.drawing()
    pages[ROOT / "docs" / "claims.md"] = report.markdown(found)
    if importlib.util.find_spec("transformers") is not None:
        import conversions

        guide = ROOT / "docs" / "guides" / "converting.md"
        pages[guide] = _with(guide.read_text("utf-8"), conversions.BEGIN, conversions.table(), conversions.END)
    return pages


def _with(whole: str, begin: str, text: str, end: str) -> str:
    """A text with what is between two of its lines replaced."""
    before, _, rest = whole.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    current = documents()
    stale = [path for path, text in current.items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current; run make docs")
        sys.exit(1 if stale else 0)
    for path, text in current.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(current)} files changed")


if __name__ == "__main__":
    main()
