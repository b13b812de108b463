"""Links of a Markdown page: where they lead, which anchors a page has, and what they become when a page is moved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LINK = re.compile(r"(\[[^\]\n]*\])\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


def prose(page: str) -> Iterator[tuple[str, bool]]:
    """Every line with its end, and whether it is text (True) or code between fences (False)."""
    fence = ""
    for line in page.splitlines(keepends=True):
        found = FENCE.match(line)
        if fence:
            yield line, False
            fence = "" if found and found[1].startswith(fence) else fence
        else:
            fence = found[1] if found else ""
            yield line, not fence


def targets(page: str) -> list[str]:
    """What a page links to, images included, in order."""
    return [found[2] for line, is_text in prose(page) if is_text for found in LINK.finditer(line)]


def is_external(target: str) -> bool:
    return target.startswith(("http:", "https:", "mailto:"))


def relinked(page: str, become: Callable[[str], str]) -> str:
    """The page with every link that stays in the repository replaced by what it becomes."""

    def change(found: re.Match[str]) -> str:
        return found[0] if is_external(found[2]) else f"{found[1]}({become(found[2])})"

    return "".join(LINK.sub(change, line) if is_text else line for line, is_text in prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site write them."""
    seen: dict[str, int] = {}
    found: set[str] = set()
    for line, is_text in prose(page):
        heading = HEADING.match(line.rstrip("\n")) if is_text else None
        if heading is None:
            continue
        slug = slugify(heading[1])
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def slugify(heading: str) -> str:
    """`A comparison at 125M (one H200)` → `a-comparison-at-125m-one-h200`."""
    words = LINK.sub(lambda found: found[1][1:-1], heading)
    return re.sub(r"[^\w\- ]", "", words).strip().lower().replace(" ", "-")
