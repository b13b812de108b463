"""Check a built site: every link and anchor inside it exists, and no page loads anything from elsewhere."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "video": "src",
}
"""What a browser fetches by itself, by tag."""
NOT_FETCHED = {"canonical", "prev", "next", "alternate"}


class Page(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        address = found.get(LOADED.get(tag, ""), "")
        if address and not (tag == "link" and found.get("rel") in NOT_FETCHED):
            self.loaded.append(address)


def complaints(site: Path) -> list[str]:
    """One line for every link that leads nowhere and every address that would be fetched from elsewhere."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found: list[str] = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links start at the root of a server
            continue
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {address}" for address in page.loaded if urlsplit(address).netloc]
        inside = [link for link in page.links + page.loaded if not urlsplit(link).scheme and not urlsplit(link).netloc]
        found += [f"{name}: {link} {why}" for link in inside if (why := _wrong(path, link, pages))]
    return found


def _wrong(page: Path, link: str, pages: dict[Path, Page]) -> str:
    """Why a link leads nowhere; empty if it does not."""
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "does not exist"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "has no such anchor"
    return ""


def main() -> None:
    site = Path(sys.argv[1])
    found = complaints(site)
    print("\n".join(found), file=sys.stderr)
    count = sum(1 for _ in site.rglob("*.html"))
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(f"{site}: {count} pages, {size / 1e6:.1f} MB, {len(found) or 'no'} broken links")
    sys.exit(1 if found or not count else 0)


if __name__ == "__main__":
    main()
