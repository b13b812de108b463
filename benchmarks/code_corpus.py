"""A corpus of Python source, from widely used packages of PyPI, for runs that need more text than books and science.

    python benchmarks/code_corpus.py --out code
    normlab ladder --data "code/code-train-*.jsonl.xz" --val-data code/code-val.jsonl.xz ...
    python benchmarks/code_corpus.py --update     # pins the newest version of every package

`code_corpus.txt` pins wheels by version and sha256; pip downloads them from wherever it is configured to. Nothing of
them is installed or run. A document is a `.py` file: wheels have little other source, and stubs repeat it. A package is
whole on one side of the split. The same manifest gives the same files. docs/texts.md says what came out.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from corpus.licences import are_permissive, licences
from corpus.near_copies import near_copies
from corpus.selection import reason_to_drop, without_header
from corpus.wheels import Pin, fetch, metadata, read_pins, sources, update_pins

from normlab.errors import NormLabError
from normlab.utils.files import replacing_folder

MANIFEST = Path(__file__).with_suffix(".txt")
TRAIN_FILES = 4
SALT = "code-1"
"""Of the split: the first of code-0, code-1, ... that held out more than 3 MB of more than ten packages."""
VAL_SHARE, VAL_BYTES = 0.04, 1_000_000
"""Share of the packages that are held out, if they have at most so much text: one must not be most of it."""

SUMS, TABLE = "SHA256SUMS", "SOURCES.md"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """From what and where the corpus is made."""

    out: Path = Path("code")
    """Folder of the corpus, replaced as a whole."""
    wheels: Path = Path("code-wheels")
    """Folder of downloaded wheels; those that are there are not downloaded again."""
    manifest: Path = MANIFEST
    """Wheels to make it of, one NAME==VERSION --hash=sha256:SUM a line."""
    update: bool = False
    """Pin the newest version of every package in the manifest, also of those that have none yet, and stop."""


class Document(NamedTuple):
    """One line of the corpus."""

    id: str
    source: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of text."""
        return len(self.text.encode())

    @property
    def line(self) -> bytes:
        """As it is written."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode() + b"\n"


class Package(NamedTuple):
    """A package whose licence allows its use, and its documents."""

    pin: Pin
    licence: str
    documents: list[Document]

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(document.size for document in self.documents)

    @property
    def is_held_out(self) -> bool:
        """Whether it is for validation. Depends on its name and size alone: new versions mostly stay on their side."""
        return _fraction(self.pin.name) < VAL_SHARE and self.size <= VAL_BYTES


class Corpus(NamedTuple):
    """Packages, and what was left out and why."""

    packages: list[Package]
    refused: dict[Pin, str]
    dropped: Counter[str]

    def side(self, *, held_out: bool) -> list[Document]:
        """Documents of one side of the split, packages mixed."""
        chosen = [package.documents for package in self.packages if package.is_held_out is held_out]
        return sorted((one for documents in chosen for one in documents), key=lambda one: _fraction(one.id))


def main(arguments: Arguments) -> None:
    if arguments.update:
        print(f"{arguments.manifest}: {len(update_pins(arguments.manifest))} wheels")
        return
    _check_replaceable(arguments.out)
    pins = read_pins(arguments.manifest)
    found = collect(pins, fetch(pins, arguments.wheels))
    write(found, arguments.out)
    documents = [document for package in found.packages for document in package.documents]
    size = sum(document.size for document in documents)
    print(f"{arguments.out}: {len(documents):,} documents, {size:,} bytes, from {len(found.packages)} packages")


def collect(pins: Sequence[Pin], wheels: Iterable[Path]) -> Corpus:
    """Read the wheels, in order of their names: of two equal files the one in the first package is kept."""
    found = Corpus([], {}, Counter())
    for pin, wheel in sorted(zip(pins, wheels, strict=True)):
        stated = licences(metadata(wheel))
        if are_permissive(stated):
            found.packages.append(Package(pin, " AND ".join(stated), _documents(pin, wheel, found.dropped)))
        else:
            found.refused[pin] = ", ".join(stated) or "none stated"
            _say(f"{pin.name}: left out for its licence ({found.refused[pin]})")
    _drop_copies(found)
    return found


def write(found: Corpus, folder: Path) -> None:
    """Write the corpus, its table of sources and its sums: all of them or, if interrupted, none."""
    train = found.side(held_out=False)
    files = {f"code-train-{part:02}.jsonl.xz": train[part::TRAIN_FILES] for part in range(TRAIN_FILES)}
    files["code-val.jsonl.xz"] = found.side(held_out=True)
    for name, documents in files.items():
        if not documents:
            raise NormLabError(f"{name} would be empty: too few packages; add some to the manifest")
    with replacing_folder(folder) as part:
        (part / TABLE).write_text(table(found), "utf-8")
        for name, documents in files.items():
            _say(f"writing {name}: {len(documents):,} documents")
            (part / name).write_bytes(lzma.compress(b"".join(document.line for document in documents)))
        sums = [f"{hashlib.sha256((part / name).read_bytes()).hexdigest()}  {name}\n" for name in (*files, TABLE)]
        (part / SUMS).write_text("".join(sums))


def table(found: Corpus) -> str:
    """Every package with its licence and share, and what was left out, as Markdown."""
    rows = [
        f"| {pin.name} | {pin.version} | {licence} | {'validation' if package.is_held_out else 'training'} "
        f"| {len(documents):,} | {package.size:,} | {pin.sha256} |"
        for package in found.packages
        for pin, licence, documents in [package]
    ]
    left_out = [f"- {pin.name} {pin.version}: licence {reason}" for pin, reason in found.refused.items()]
    dropped = [f"- files, {reason}: {count:,}" for reason, count in sorted(found.dropped.items())]
    return "\n".join(
        ["# Sources of the corpus", "", "Made by benchmarks/code_corpus.py of NormLab.", "",
         "| package | version | licence | side | documents | bytes | sha256 of the wheel |",
         "|---|---|---|---|---|---|---|",
         *rows, "", "## Left out", "", *left_out, *dropped, ""]
    )  # fmt: skip


def _documents(pin: Pin, wheel: Path, dropped: Counter[str]) -> list[Document]:
    kept = []
    for path, raw in sources(wheel):
        if reason := reason_to_drop(path, raw):
            dropped[reason] += 1
        else:
            text = raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
            kept.append(Document(f"{pin.name}-{pin.version}/{path}", pin.name, text))
    return sorted(kept)


def _drop_copies(found: Corpus) -> None:
    _say("looking for near copies")
    # With the notices, a short file would make near copies of all longer ones that begin with the same.
    bodies = [without_header(document.text) for package in found.packages for document in package.documents]
    copies = iter(near_copies(bodies))
    for package in found.packages:
        kept = [document for document in package.documents if not next(copies)]
        found.dropped["near copy of a document that was kept"] += len(package.documents) - len(kept)
        package.documents[:] = kept


def _check_replaceable(folder: Path) -> None:
    """Raise if the folder holds anything but a corpus of this script."""
    if folder.exists() and not folder.is_dir():
        raise NormLabError(f"{folder} is a file; name a folder for the corpus")
    own = (SUMS, TABLE, "code-train-*.jsonl.xz", "code-val.jsonl.xz")
    if others := [path.name for path in folder.glob("*") if not any(map(path.match, own))]:
        what = f"{folder} holds other files ({min(others)}) and would be replaced"
        raise NormLabError(f"{what}; name a folder of its own")


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{SALT} {name}".encode()).digest()[:8], "big") / 2.0**64


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments, description=__doc__))
    except NormLabError as error:
        _say(f"code_corpus: {error}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        _say("code_corpus: stopped; the same command goes on")
        raise SystemExit(130) from None
