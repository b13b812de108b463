"""The corpus of source code of benchmarks/code_corpus.py, made of wheels that the tests write; no network."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import random
import runpy
import shutil
import stat
import sys
import tracemalloc
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from normlab import NormLabError
from normlab.data import prepare

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import code_corpus
from corpus import wheels
from corpus.licences import are_permissive, licences
from corpus.near_copies import near_copies
from corpus.selection import reason_to_drop
from corpus.wheels import Pin

PACKAGES = (code_corpus.Package(Pin(f"p{number}", "1.0", ""), "MIT", []) for number in range(999))
HELD_OUT = next(package.pin.name for package in PACKAGES if package.is_held_out)
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def code(seed: int, lines: int = 30) -> str:
    """Source that shares no 8 words with that of another seed."""
    chance = random.Random(seed)
    return "".join(f"name{chance.random()} = call{chance.random()}(argument)\n" for _ in range(lines))


def make(folder: Path, name: str, files: dict[str, str | bytes], licence: str = "MIT") -> Pin:
    """Write a wheel."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        about = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n\nAbout it\n"
        archive.writestr(f"{name}-1.0.dist-info/METADATA", about)
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", WHEEL)
        for member, content in files.items():
            archive.writestr(member, content)
    return Pin(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


def manifest(path: Path, pins: list[Pin]) -> Path:
    path.write_text("# About it\n" + "".join(f"{pin}\n" for pin in pins))
    return path


@pytest.fixture
def arguments(tmp_path) -> code_corpus.Arguments:
    """Three packages, which are there already: nothing is left to download."""
    folder, windows = tmp_path / "wheels", "\ufeff" + code(10).replace("\n", "\r\n")
    near = code(2, lines=20) + code(21, lines=8)
    pins = [
        make(folder, "ant", {f"ant/m{number}.py": code(number) for number in range(6)}),
        make(folder, "bee", {"bee/a.py": windows, "bee/copy.py": code(3), "bee/no.txt": code(11)}),
        make(folder, HELD_OUT, {f"{HELD_OUT}/a.py": code(20), f"{HELD_OUT}/near.py": near}),
        make(folder, "wasp", {"wasp/a.py": code(30)}, licence="GPL-3.0-only"),
    ]  # fmt: skip
    return code_corpus.Arguments(out=tmp_path / "code", wheels=folder, manifest=manifest(tmp_path / "pins.txt", pins))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().split("\n") if line]


def names_and_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_corpus_has_every_file_once_and_a_package_on_one_side(arguments, capsys):
    code_corpus.main(arguments)
    train = [one for path in sorted(arguments.out.glob("code-train-*.jsonl.xz")) for one in lines(path)]
    ants = [f"ant-1.0/ant/m{number}.py" for number in range(6)]
    assert sorted(one["id"] for one in train) == [*ants, "bee-1.0/bee/a.py"]
    assert next(one["text"] for one in train if one["source"] == "bee") == code(10)
    (held_out,) = lines(arguments.out / "code-val.jsonl.xz")
    assert held_out == {"id": f"{HELD_OUT}-1.0/{HELD_OUT}/a.py", "source": HELD_OUT, "text": code(20)}
    table = (arguments.out / "SOURCES.md").read_text()
    assert f"| ant | 1.0 | MIT | training | 6 | {sum(len(code(number)) for number in range(6)):,} |" in table
    assert f"| {HELD_OUT} | 1.0 | MIT | validation | 1 |" in table
    assert "- wasp 1.0: licence GPL-3.0-only\n- files, near copy of a document that was kept: 2\n" in table
    for line in (arguments.out / "SHA256SUMS").read_text().splitlines():
        total, name = line.split("  ")
        assert hashlib.sha256((arguments.out / name).read_bytes()).hexdigest() == total
    assert "wasp: left out for its licence (GPL-3.0-only)" in capsys.readouterr().err
    data, held_out = f"{arguments.out}/code-train-*.jsonl.xz", f"{arguments.out}/code-val.jsonl.xz"
    found = prepare([data], val_data=[held_out], progress=False)
    assert (found.train.n_documents, found.val.n_documents) == (7, 1)


def test_a_large_package_is_not_held_out():
    def package(size: int) -> code_corpus.Package:
        return code_corpus.Package(Pin(HELD_OUT, "1.0", ""), "MIT", [code_corpus.Document("a", HELD_OUT, size * "x")])

    assert package(code_corpus.VAL_BYTES).is_held_out
    assert not package(code_corpus.VAL_BYTES + 1).is_held_out


def test_the_same_manifest_gives_the_same_bytes(arguments):
    code_corpus.main(arguments)
    first = names_and_bytes(arguments.out)
    manifest(arguments.manifest, wheels.read_pins(arguments.manifest)[::-1])
    code_corpus.main(arguments)
    assert names_and_bytes(arguments.out) == first


def test_an_interruption_leaves_the_corpus_that_was_there(arguments, monkeypatch):
    code_corpus.main(arguments)
    before = names_and_bytes(arguments.out)
    monkeypatch.setattr(code_corpus, "SALT", "another")
    compressed = iter([b"x", b"y"])

    def compress(_: bytes) -> bytes:
        for part in compressed:
            return part
        raise KeyboardInterrupt

    monkeypatch.setattr(code_corpus.lzma, "compress", compress)
    monkeypatch.setattr(code_corpus, "VAL_SHARE", 0.5)
    with pytest.raises(KeyboardInterrupt):
        code_corpus.main(arguments)
    assert names_and_bytes(arguments.out) == before
    assert sorted(path.name for path in arguments.out.parent.iterdir()) == ["code", "pins.txt", "wheels"]


def test_a_folder_with_other_files_is_not_replaced(arguments):
    arguments.out.mkdir()
    (arguments.out / "thesis.tex").touch()
    with pytest.raises(NormLabError, match=r"holds other files \(thesis\.tex\).*name a folder of its own"):
        code_corpus.main(arguments)


def test_errors_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["code_corpus.py", "--manifest", "no.txt"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(code_corpus.__file__, run_name="__main__")
    assert stop.value.code == 2
    said = "code_corpus: cannot read no.txt: No such file or directory; check the path\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "raw", "reason"),
    [
        ("a/b.py", code(0), ""),
        ("a/contest.py", code(0), ""),
        ("a/testing/b.py", code(0), ""),
        ("a/_vendor/b.py", code(0), "vendored"),
        ("a/third_party/deep/b.py", code(0), "vendored"),
        ("a/vendor.py", code(0), ""),
        ("a/tests/b.py", code(0), "tests"),
        ("a/test_b.py", code(0), "tests"),
        ("a/b.py", code(0).encode("utf-16"), "not UTF-8"),
        ("a/b.py", b"# caf\xe9\n" + code(0).encode(), "not UTF-8"),
        ("a/b.py", code(0) + "\0", "not text"),
        ("a/b_pb2.py", code(0), "generated"),
        ("a/b.py", "# This file was auto-generated.\n" + code(0), "generated"),
        ("a/b.py", code(0, lines=100) + "# generated by hand\n", ""),
        ("a/b.py", code(0, lines=2), "short"),
        ("a/b.py", "", "short"),
        ("a/b.py", code(0, lines=300) + "x" * 1001, "long lines"),
        ("a/b.py", ("word " * 30 + "\n") * 9, "long lines"),
        ("a/b.py", "table = [\n" + "0.123, 4.567, 8.901,\n" * 99 + "]\n", "few letters"),
    ],
)
def test_only_source_that_people_wrote_is_kept(path, raw, reason):
    assert reason_to_drop(path, raw.encode() if isinstance(raw, str) else raw) == reason


def test_nothing_but_regular_files_of_the_wheel_is_read(tmp_path):
    link = zipfile.ZipInfo("a/link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    outside = dict.fromkeys(("../up.py", "a/../../up.py", "/root.py", "a\\..\\b.py"), "0")
    make(tmp_path, "a", outside | {"a/data.json": "5", "a/b.py": "6"})
    path = tmp_path / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.mkdir("a/folder.py")
        archive.writestr("a/large.py", bytes(wheels.MEMBER_BYTES + 1), zipfile.ZIP_DEFLATED)
    assert list(wheels.sources(path)) == [("a/b.py", b"6")]


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "a", {f"a/{number}.py": bytes(600) for number in range(3)})
    path = tmp_path / "a-1.0-py3-none-any.whl"
    monkeypatch.setattr(wheels, "WHEEL_BYTES", 1500)
    with pytest.raises(NormLabError, match=r"a-1\.0-py3-none-any\.whl: over 0 MiB of source; take it out"):
        list(wheels.sources(path))


def test_a_member_that_is_larger_than_it_says_is_not_unpacked(tmp_path):
    packed, real = io.BytesIO(), 8 * wheels.MEMBER_BYTES
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", bytes(real))
    path = tmp_path / "a-1.0-py3-none-any.whl"
    path.write_bytes(packed.getvalue().replace(real.to_bytes(4, "little"), (100).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.raises(NormLabError, match="broken wheel"):
        list(wheels.sources(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * wheels.MEMBER_BYTES


@pytest.mark.parametrize("content", [b"", b"no wheel", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "no metadata"])
def test_a_file_that_is_no_wheel_is_named(tmp_path, content):
    (tmp_path / "a.whl").write_bytes(content)
    with pytest.raises(NormLabError, match=r"^a\.whl: "):
        wheels.metadata(tmp_path / "a.whl")


def test_another_compression_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.py", "1")
    with pytest.raises(NormLabError, match=r"a\.py is compressed by method 12"):
        list(wheels.sources(tmp_path / "a.whl"))


def test_notices_at_the_top_do_not_make_near_copies(arguments):
    notice = "".join(f"# {line}" for line in code(40, lines=20).splitlines(keepends=True)) + "\n"
    files = {f"ant/m{number}.py": notice + code(50 + number, lines=12) for number in range(6)}
    pin = make(arguments.wheels, "ant", files | {"ant/empty.py": notice})
    pins = wheels.read_pins(arguments.manifest)
    manifest(arguments.manifest, [pin, *pins[1:]])
    code_corpus.main(arguments)
    table = (arguments.out / "SOURCES.md").read_text()
    assert "| ant | 1.0 | MIT | training | 6 |" in table
    assert "- files, short: 1" in table


def test_near_copies_are_those_of_one_document_that_was_kept():
    def half(first: int, second: int) -> str:
        return code(first, lines=100) + code(second, lines=100)

    header = "# Licensed under some licence; see the file with its text for what you may do with this code.\n"
    texts = [
        code(3, lines=40),  # all of it is in the third, of which it is a small part
        header + half(1, 2) + code(8),  # kept
        header + half(3, 4) + code(9),  # a header does not make a copy
        half(1, 2),  # all of it is in the second
        half(2, 5) + code(10, lines=5),  # half of it is in the second
        half(5, 6),  # half of it is in one that was dropped
        code(7, lines=80) + code(4, lines=20),  # a fifth
    ]
    assert near_copies(texts).tolist() == [True, False, False, True, True, False, False]
    assert near_copies([]).tolist() == []
    assert near_copies(["one two", "one two", "two one"]).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("headers", "names", "permissive"),
    [
        ("License-Expression: MIT", ["MIT"], True),
        ("License-Expression: (MIT OR Apache-2.0) AND BSD-3-Clause", ["MIT", "Apache-2.0", "BSD-3-Clause"], True),
        ("License-Expression: Apache-2.0 WITH LLVM-exception", ["Apache-2.0 WITH LLVM-exception"], True),
        ("License-Expression: MIT AND LGPL-2.1-or-later", ["MIT", "LGPL-2.1-or-later"], False),
        ("License-Expression: GPL-3.0-only\nClassifier: License :: Public Domain", ["GPL-3.0-only"], False),
        ("Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: MIT License", ["MIT"], True),
        ("Classifier: License :: OSI Approved :: BSD License\nLicense: GPL", ["BSD"], True),
        ("Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
         ["OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"], False),
        ("License: Apache License, Version 2.0", ["Apache-2.0"], True),
        ("License: MIT License\n  Copyright", [], False),
        ("License: ours", ["ours"], False),
        ("Classifier: Programming Language :: Python", [], False),
    ],
)  # fmt: skip
def test_only_stated_permissive_licences_are_taken(headers, names, permissive):
    found = licences(message_from_string(headers + "\n\n"))
    assert (found, are_permissive(found)) == (names, permissive)


class Pip:
    """In place of pip: copies wheels from a folder, or is interrupted."""

    def __init__(self, store: Path):
        self.store, self.asked, self.interrupted_at = store, [], 0

    def __call__(self, *words: str, text: str = "") -> str:
        self.asked.append([line.partition("==")[0] for line in text.splitlines()])
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        for name in self.asked[-1]:
            shutil.copy(self.store / f"{name}-1.0-py3-none-any.whl", words[words.index("--dest") + 1])
        return ""


def test_a_download_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    pins = [make(tmp_path / "store", name, {f"{name}.py": name}) for name in "abcde"]
    pip = Pip(tmp_path / "store")
    monkeypatch.setattr(wheels, "_pip", pip)
    monkeypatch.setattr(wheels, "BATCH", 2)
    pip.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        wheels.fetch(pins, tmp_path / "wheels")
    # A file that was torn while it was copied counts as missing.
    (tmp_path / "wheels" / "b-1.0-py3-none-any.whl").write_bytes(b"PK")
    found = wheels.fetch(pins, tmp_path / "wheels")
    assert pip.asked == [["a", "b"], ["c", "d"], ["e"], ["b", "e"]]
    assert [path.name for path in found] == [f"{name}-1.0-py3-none-any.whl" for name in "abcde"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("six", "six has no version and sha256; add them with --update"),
        ("six==1.0", r"line 2: expected NAME==VERSION --hash=sha256:SUM, got 'six==1\.0'"),
        ("--index-url elsewhere", "line 2: expected NAME"),
        ("six==1.0 --hash=sha256:" + 64 * "0" + " --pre", "line 2: expected NAME"),
    ],
)
def test_a_manifest_holds_nothing_but_pins(tmp_path, line, message):
    (tmp_path / "pins.txt").write_text(f"# About it\n{line}\n")
    with pytest.raises(NormLabError, match=message):
        wheels.read_pins(tmp_path / "pins.txt")


def test_an_update_pins_what_pip_would_install(tmp_path, monkeypatch, capsys):
    path = manifest(tmp_path / "pins.txt", [Pin("six", "1.0", 64 * "0")])
    path.write_text(path.read_text() + "Attrs\n")
    archive = {"archive_info": {"hashes": {"sha256": 64 * "1"}}}

    def pip(*words: str) -> str:
        found = [{"metadata": {"name": name, "version": "2.0"}, "download_info": archive} for name in words[-2:]]
        return json.dumps({"install": found[::-1]})

    monkeypatch.setattr(wheels, "_pip", pip)
    code_corpus.main(code_corpus.Arguments(manifest=path, update=True))
    sums = f"--hash=sha256:{64 * '1'}"
    assert path.read_text() == f"# About it\nattrs==2.0 {sums}\nsix==2.0 {sums}\n"
    assert capsys.readouterr().out == f"{path}: 2 wheels\n"


def test_the_manifest_of_the_repository_is_whole():
    names = [pin.name for pin in wheels.read_pins(code_corpus.MANIFEST)]
    assert len(names) > 150
    assert names == sorted(set(names))
    assert "://" not in code_corpus.MANIFEST.read_text("utf-8")


@pytest.mark.full
def test_pip_itself_downloads_and_verifies(tmp_path, monkeypatch):
    """pip, with no index but a folder."""
    pin = make(tmp_path / "store", "ant", {"ant.py": code(1)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "store"))
    (found,) = wheels.fetch([pin], tmp_path / "wheels")
    assert list(wheels.sources(found)) == [("ant.py", code(1).encode())]
    with pytest.raises(NormLabError, match=r"^pip download: THESE PACKAGES DO NOT MATCH THE HASHES"):
        wheels.fetch([pin._replace(sha256=64 * "0")], tmp_path / "others")
    with pytest.raises(NormLabError, match=r"^pip download: No matching distribution found for ant==2\.0$"):
        wheels.fetch([Pin("ant", "2.0", 64 * "0")], tmp_path / "others")
    path = manifest(tmp_path / "pins.txt", [pin._replace(version="0.9")])
    assert wheels.update_pins(path) == [pin]
