"""Sources: the same documents in the same order whatever holds them, and one line for whatever is broken."""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import os
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from normlab.data import open_source, open_sources, readers
from normlab.errors import NormLabError
from tests.data.helpers import write_lines

TEXTS = ["first", "zweiter Text: äöü", "第三\n\ttab", "🙂" * 10, "\x00\x7f odd"]


_PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def _texts(spec: str | Path) -> list[str]:
    return [document.text for document in open_source(str(spec))]


def _compress(path: Path, suffix: str) -> Path:
    raw, packed = path.read_bytes(), path.with_name(path.name + suffix)
    packed.write_bytes(_PACK[suffix](raw))
    path.unlink()
    return packed


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_lines_of_json_compressed_or_not(tmp_path, suffix):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    assert _texts(_compress(path, suffix) if suffix else path) == TEXTS


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".tex", ".txt.gz", ".md.xz", ".tex.zst"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    kind, _, packing = suffix[1:].partition(".")
    path = tmp_path / f"a.{kind}"
    path.write_bytes("line\r\nzwei ü\n".encode())
    assert _texts(_compress(path, f".{packing}") if packing else path) == ["line\r\nzwei ü\n"]


@pytest.mark.parametrize(("suffix", "padding"), [(".gz", 0), (".gz", 512), (".xz", 0), (".xz", 512), (".zst", 0)])
def test_two_frames_in_a_row_are_one_file(tmp_path, suffix, padding):
    path, pack = tmp_path / f"a.txt{suffix}", _PACK[suffix]
    path.write_bytes(pack(b"one ") + bytes(padding) + pack(b"two") + bytes(padding))
    assert _texts(path) == ["one two"]


@pytest.mark.parametrize("suffix", _PACK)
def test_a_damaged_second_frame_is_not_the_end_of_the_file(tmp_path, suffix):
    path, pack = tmp_path / f"a.txt{suffix}", _PACK[suffix]
    path.write_bytes(pack(b"one ") + b"nonsense" + pack(b"two"))
    with pytest.raises(NormLabError, match=rf"^a\.txt\{suffix}: broken {suffix[1:]} data"):
        _texts(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "nonsense"])
def test_broken_compression_names_the_file(tmp_path, suffix, damage):
    path = tmp_path / "a.txt"
    path.write_bytes(os.urandom(200_000).hex().encode())
    packed = _compress(path, suffix)
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"nonsense" * 10)
    with pytest.raises(NormLabError, match=rf"^a\.txt\{suffix}: broken {suffix[1:]} data"):
        _texts(packed)


@pytest.mark.parametrize("rows_in_a_group", [1, 2, 100])
def test_parquet(tmp_path, rows_in_a_group):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": TEXTS * 40, "other": list(range(5 * 40))})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_in_a_group)
    assert _texts(path) == TEXTS * 40
    with pytest.raises(NormLabError, match="'other' holds int, expected text"):
        _texts(f"{path}#other")
    with pytest.raises(NormLabError, match="no column 'body', only 'text', 'other'; name one with PATH#COLUMN"):
        _texts(f"{path}#body")


def test_broken_parquet_names_the_file(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not a table")
    with pytest.raises(NormLabError, match=r"^a\.parquet: not a parquet table"):
        _texts(tmp_path / "a.parquet")


def test_a_field_by_name_and_a_hash_in_a_file_name(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS, field="body")
    assert _texts(f"{path}#body") == TEXTS
    assert _texts(write_lines(tmp_path / "b#body.jsonl", TEXTS)) == TEXTS


def test_a_folder_and_a_glob_in_the_order_of_names(tmp_path):
    for name in ("b/z.txt", "b/a.md", "a.txt", ".hidden/x.txt", "b/.y.txt", "b/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "missing")
    assert _texts(tmp_path) == ["a.txt", "b/a.md", "b/z.txt"]
    assert _texts(tmp_path / "**/*.txt") == ["a.txt", "b/z.txt"]
    assert [d.id for d in open_source(str(tmp_path))] == ["a.txt", "b/a.md", "b/z.txt"]
    assert [d.text for d in open_sources([str(tmp_path / "b/z.txt"), str(tmp_path / "a.txt")])] == ["b/z.txt", "a.txt"]


def test_empty_files_lines_and_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n\r\n{"text": "x"}')
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "d.txt").write_text(" ")
    assert _texts(tmp_path) == ["x", " "]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "y"}\n')
    assert _texts(tmp_path) == ["x", "y"]


@pytest.mark.parametrize("ends", ["\n", " ", "é"])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_a_large_text_is_read_in_sections_that_make_up_the_whole(tmp_path, monkeypatch, ends, size):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 16)
    monkeypatch.setattr(readers, "WHOLE_BYTES", 64)
    text = ("€uro" + ends) * (size // 7) + "x" * (size % 7)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = _texts(tmp_path / "a.txt")
    assert "".join(found) == text
    assert len(found) <= 1 or len(text.encode()) > 64
    assert all(len(piece.encode()) <= 32 for piece in found) or len(found) == 1


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_lines_longer_than_a_chunk(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk)
    path = write_lines(tmp_path / "a.jsonl", [*TEXTS, "long " * 200, "last"])
    assert _texts(path) == [*TEXTS, "long " * 200, "last"]
    assert [d.id for d in open_source(str(path))] == [f"a.jsonl:{line}" for line in range(1, 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", r"a\.jsonl, line 2: not JSON"),
        (b'{"text": "\xff"}', r"a\.jsonl, line 2: byte 0xff is not UTF-8"),
        (b'{"body": "x"}', r"a\.jsonl, line 2: no field 'text', only 'body'; name one with PATH#FIELD"),
        (b"{}", r"a\.jsonl, line 2: no field 'text', only nothing"),
        (b'{"text": 3}', r"a\.jsonl, line 2: field 'text' holds int, expected text"),
        (b'["x"]', r"a\.jsonl, line 2: a list, expected an object"),
        (b'{"text": "\\ud83d"}', r"a\.jsonl, line 2: field 'text' holds half a surrogate pair"),
        (b'{"text": ' + b"9" * 5000 + b"}", r"a\.jsonl, line 2: not JSON"),
        (b"[" * 100_000, r"a\.jsonl, line 2: not JSON"),
    ],
)
@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_a_broken_line_is_named(tmp_path, monkeypatch, line, message, chunk):
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(NormLabError, match=message) as caught:
        _texts(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


def test_wrong_encoding_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("eins\nzwei\ndr\u00fci".encode("latin-1"))
    with pytest.raises(NormLabError, match=r"a\.txt, line 3: byte 0xfc is not UTF-8"):
        _texts(tmp_path / "a.txt")


def test_a_file_of_zeros_is_no_text(tmp_path):
    (tmp_path / "hole.txt").write_bytes(b"text" + bytes(100_000))
    message = r"hole\.txt, line 1: 100,000 of 100,004 characters are NUL, .*; expected text"
    with pytest.raises(NormLabError, match=message):
        _texts(tmp_path / "hole.txt")
    (tmp_path / "odd.txt").write_bytes(b"a NUL now and then\0 does no harm")
    assert len(_texts(tmp_path / "odd.txt")) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.txt", "no file matches 'missing.txt'"),
        ("", "the name of a source is empty; expected 'python', a file"),
        ("*.jsonl", "no file matches"),
        ("a.png", r"a\.png: not a kind of file that can be read; expected \.txt"),
        ("a.parquet.gz", "not a kind of file"),
        ("empty", "holds no file that can be read"),
        ("hf:", "is not a dataset; expected hf:NAME"),
    ],
)
def test_what_cannot_be_a_source(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    Path("a.png").touch()
    Path("a.parquet.gz").touch()
    Path("empty").mkdir()
    with pytest.raises(NormLabError, match=message):
        open_source(spec)


@pytest.mark.parametrize("specs", [[], "python"])
def test_no_list_of_sources(specs):
    with pytest.raises(NormLabError, match="no data given"):
        open_sources(specs)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    source = open_source(str(path))
    path.unlink()
    for call in (source.fingerprint, source.stamp, lambda: list(source)):
        with pytest.raises(NormLabError, match=r"a\.jsonl: cannot be read: No such file"):
            call()


def test_the_fingerprint_follows_content_and_names_alone(tmp_path):
    def made(folder: str, **files: str) -> Path:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / f"{name}.txt").write_text(text)
        return tmp_path / folder

    def mark(path: Path, field: str = "") -> str:
        return open_source(f"{path}{field}").fingerprint()

    base = made("a", x="one", y="two")
    before = mark(base)
    os.utime(base / "x.txt", (0, 0))
    assert mark(base) == before
    assert mark(made("elsewhere", x="one", y="two")) == before
    assert mark(base / "*.txt") == before
    different = [
        mark(made("b", x="one", y="tw0")),
        mark(made("c", x="one", z="two")),
        mark(made("d", x="onet", y="wo")),
        mark(made("e", x="one", y="two", z="")),
        mark(base, "#field"),
    ]
    assert len({before, *different}) == 6


def test_the_standard_library_is_read_in_place():
    source = open_source("python")
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {document.id: document.text for document in source}
    assert documents["json/decoder.py"] == (root / "json" / "decoder.py").read_text(encoding="utf-8")
    assert "pydoc_data/topics.py" in documents
    assert list(documents) == sorted(documents)
    assert sum(map(len, documents.values())) > 5_000_000
    parts = {part for name in documents for part in Path(name).parts}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [name for name in documents if "_sysconfigdata" in name]


def test_python_sources_in_their_declared_encoding(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\n# ü\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"\xff\xfe nothing that can be decoded")
    (tmp_path / "c.py").write_bytes(b"# coding: no-such-thing\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert _texts("python") == ["# coding: latin-1\n# ü\n"]
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(NormLabError, match="keeps no source"):
        open_source("python")


class _Rows:
    """As much of a dataset as is used."""

    def __init__(self, columns: dict[str, list]):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def iter(self, batch_size: int):
        for start in range(0, len(self), batch_size):
            yield {name: values[start : start + batch_size] for name, values in self.columns.items()}


def test_a_dataset_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config=None, *, split):
        asked.append((name, config, split))
        return _Rows({"text": TEXTS * 30, "body": ["b"] * 150, "number": [1] * 150})

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert _texts("hf:me/books") == TEXTS * 30
    assert _texts("hf:me/books:en@validation[:10%]#body") == ["b"] * 150
    assert asked == [("me/books", None, "train"), ("me/books", "en", "validation[:10%]")]
    text, body = open_source("hf:me/books"), open_source("hf:me/books#body")
    assert text.fingerprint() == open_source("hf:you/same").fingerprint() != body.fingerprint()
    assert text.describe() == "hf:me/books: 150 rows"
    with pytest.raises(
        NormLabError, match="no field 'x', only 'text', 'body', 'number'; name one with hf:me/books#FIELD"
    ):
        open_source("hf:me/books#x")
    with pytest.raises(NormLabError, match=r"hf:me/books#number:0: field 'number' holds int, expected text"):
        _texts("hf:me/books#number")


def test_a_real_dataset_object(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = datasets.Dataset.from_dict({"text": TEXTS * 30})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: rows)
    assert _texts("hf:me/books") == TEXTS * 30


def test_a_dataset_that_does_not_load(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network\nand a long story")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(NormLabError, match=r"^hf:me/books: cannot be loaded \(no network\); check name") as caught:
        open_source("hf:me/books")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("zstandard", "a.txt.zst", "zstd"), ("pyarrow.parquet", "a.parquet", "parquet"), ("datasets", "hf:a/b", "hf")],
)
def test_an_absent_package_names_its_extra(tmp_path, monkeypatch, package, name, extra):
    (tmp_path / name.replace("/", "_")).touch()
    real = importlib.import_module

    def absent(wanted, *rest):
        if wanted == package:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(
        NormLabError, match=rf'needs {package}, which is missing; try: pip install "normlab\[{extra}\]"'
    ):
        _texts(name if ":" in name else tmp_path / name)


def test_descriptions_are_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    size = path.stat().st_size / 1e6
    assert open_source(str(path)).describe() == f"{path}: 1 file, {size:,.1f} MB"
    both = open_sources([str(path), "python"]).describe()
    assert both.count("; ") == 1
    assert json.dumps(both).count("\\n") == 0
