"""Assemble the sources of the site in build/website: pages of the repository, sources that they link to, the API.

Links keep meaning what they mean in the repository: to a page, to a file's text (a page of its own on the site), or to
data (copied). Nothing of the package is imported, so the site is built without torch.
"""

from __future__ import annotations

import posixpath
import shutil
from pathlib import Path

from links import is_external, relinked, targets
from notebook_page import as_markdown
from reference import reference_pages

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "website"
CONFIG = Path(__file__).with_name("mkdocs.yml")
MOVED = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md"}
"""Pages that the site shows under another name."""
PROJECT = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".txt": "text",
    ".cff": "yaml",
    "": "text",
}
"""Files that are shown as text, by suffix; all others are copied as they are."""
PICTURES = (".svg", ".png")


def pages() -> dict[str, str]:
    """The repository's pages: path there → path on the site."""
    found = {path: MOVED.get(path, path) for path in (*MOVED, *PROJECT)}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        found[_posix(page)] = page.relative_to(ROOT / "docs").as_posix()
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        found[_posix(notebook)] = f"{notebook.stem}.md"
    return found


class Site:
    """What is written so far, and what linked files are still to be shown."""

    def __init__(self, out: Path) -> None:
        self.out = out / "docs"
        self.places = pages()
        self.waiting = list(self.places)

    def write_all(self) -> None:
        """Write every page, and every file that one of them links to, once."""
        while self.waiting:
            self._write(self.waiting.pop())

    def _write(self, source: str) -> None:
        target = self.out / self.places[source]
        target.parent.mkdir(parents=True, exist_ok=True)
        path = ROOT / source
        if path.suffix == ".ipynb" and target.suffix == ".md":
            target.write_text(self._with_links(source, as_markdown(path, target)), "utf-8")
        elif path.suffix == ".md":
            target.write_text(self._with_links(source, path.read_text("utf-8")), "utf-8")
        elif target.suffix == ".md":
            target.write_text(self._listing(source) if path.is_dir() else _as_page(path), "utf-8")
        else:
            shutil.copyfile(path, target)

    def _with_links(self, source: str, page: str) -> str:
        return relinked(page, lambda target: self._become(source, target))

    def _become(self, source: str, target: str) -> str:
        """A link of a page in the repository, as its page on the site must write it."""
        path, _, anchor = target.partition("#")
        if not path:
            return target
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / found).exists():
            raise SystemExit(f"{source}: link to {target}, which does not exist")
        here = posixpath.dirname(self.places[source])
        return posixpath.relpath(self._place(found), here or ".") + (f"#{anchor}" if anchor else "")

    def _place(self, source: str) -> str:
        """Where a file of the repository is on the site; remembers that it is needed."""
        if source not in self.places:
            self.places[source] = _place_of_file(ROOT / source, source)
            self.waiting.append(source)
        return self.places[source]

    def _listing(self, folder: str) -> str:
        """A folder that a page links to: its files, each with its text."""
        names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
        here = posixpath.dirname(self.places[folder])
        lines = [f"- [{name}]({posixpath.relpath(self._place(f'{folder}/{name}'), here)})" for name in names]
        return f"# {folder}\n\n" + "\n".join(lines) + "\n"


def _place_of_file(path: Path, source: str) -> str:
    if path.is_dir():
        return f"source/{source}/index.md"
    if path.suffix in PICTURES:
        return source.removeprefix("docs/")
    return f"source/{source}.md" if path.suffix in LANGUAGES else f"files/{source}"


def _as_page(path: Path) -> str:
    return (
        f"# {path.name}\n\n`{_posix(path)}`\n\n````{LANGUAGES[path.suffix]}\n{path.read_text('utf-8').rstrip()}\n````\n"
    )


def scheme_index() -> str:
    """The table of schemes, from the README, which `make docs` writes."""
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.partition("<!-- schemes: begin (make docs) -->")[2].partition("<!-- schemes: end -->")[0]
    text = (
        "# Schemes\n\nA scheme says how the hidden state takes the update that a sublayer (attention, MLP) computes. "
        "One page each: equation, law, cost, speed, who uses it, what is known to fail.\n"
    )
    return text + table.replace("docs/schemes/", "")


def config(added: dict[str, list[str]]) -> str:
    """mkdocs.yml with the pages that nobody lists by hand."""
    text = CONFIG.read_text("utf-8").replace("../..", str(ROOT))
    for mark, names in added.items():
        line = next(line for line in text.splitlines() if line.strip() == f"# {mark}")
        indent = line[: len(line) - len(line.lstrip())]
        text = text.replace(line, "\n".join(f"{indent}- {name}" for name in names))
    return text


def main(out: Path = OUT) -> None:
    shutil.rmtree(out, ignore_errors=True)
    site = Site(out)
    site.write_all()
    for name in ("iframe-worker.js", "extra.css"):
        shutil.copyfile(CONFIG.with_name(name), site.out / name)
    (site.out / "schemes" / "index.md").write_text(scheme_index(), "utf-8")
    reference = reference_pages(ROOT / "normlab")
    for name, page in reference.items():
        (site.out / "api").mkdir(exist_ok=True)
        (site.out / "api" / name).write_text(page, "utf-8")
    schemes = sorted(place for place in site.places.values() if place.startswith("schemes/"))
    listed = CONFIG.read_text("utf-8")
    others = sorted(place for place in site.places.values() if place.endswith(".md") and place not in listed)
    added = {
        "schemes": schemes,
        "api": [f"api/{name}.md" for name in sorted(name.removesuffix(".md") for name in reference) if name != "index"],
        "guides that are not named above": [name for name in others if name.startswith("guides/")],
        "source": [name for name in others if not name.startswith(("guides/", "schemes/", "source/"))],
    }
    (out / "mkdocs.yml").write_text(config(added), "utf-8")
    print(f"{len(site.places)} files, {len(reference)} pages of the API")


def _posix(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def broken_links(source: str, page: str) -> list[str]:
    """Links of a page to files that do not exist. `assemble.py` stops at the first; tests show all."""
    folder = (ROOT / source).parent
    inside = [target for target in targets(page) if not is_external(target) and not target.startswith("#")]
    return [target for target in inside if not (folder / target.partition("#")[0]).exists()]


if __name__ == "__main__":
    main()
