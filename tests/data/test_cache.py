"""The token cache: right, built once, whole or absent, whoever dies and whoever else builds."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from normlab.data import cache as cache_module
from normlab.data import encode as encode_module
from normlab.data import open_source, open_sources, readers
from normlab.data.cache import TokenCache, cache_root, cached_tokenizer, cached_tokens
from normlab.data.sources import Files
from normlab.data.tokenizer import Bytes, Subwords, train_bpe
from normlab.errors import NormLabError
from normlab.utils.locks import wait_for
from tests.data.helpers import write_lines

TEXTS = [f"document {i}: " + "äbc " * (i % 17) for i in range(300)]
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def source(tmp_path):
    return open_source(str(write_lines(tmp_path / "a.jsonl", TEXTS)))


def _cached(source, root: Path, tokenizer=None, workers: int = 2) -> TokenCache:
    return cached_tokens(source, tokenizer or Bytes(), root, workers=workers, progress=False)


def _check(found: TokenCache, texts=TEXTS, tokenizer=None) -> None:
    tokenizer = tokenizer or Bytes()
    expected = [[*tokenizer.encode(text), tokenizer.end] for text in texts]
    assert found.tokens.tolist() == [token for document in expected for token in document]
    assert found.starts.tolist() == [0, *np.cumsum([len(document) for document in expected])]
    raw = [text.encode() for text in texts]
    assert found.bytes.tolist() == [len(text) for text in raw]
    assert found.digests.tolist() == [int(hashlib.sha256(text).hexdigest()[:16], 16) for text in raw]


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_the_order_is_that_of_the_source(tmp_path, source, monkeypatch, workers, chunk):
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(encode_module, "_BATCH_BYTES", chunk)
    _check(_cached(source, tmp_path / "root", workers=workers))


def test_many_small_files_and_several_sources(tmp_path):
    for folder, texts in (("x", TEXTS[:100]), ("y", TEXTS[100:])):
        (tmp_path / folder).mkdir()
        for i, text in enumerate(texts):
            (tmp_path / folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    _check(_cached(open_sources([str(tmp_path / "x"), str(tmp_path / "y")]), tmp_path / "root"))


def test_narrow_and_wide_types(tmp_path, source):
    words = train_bpe(TEXTS, 270)
    assert _cached(source, tmp_path / "root", words).tokens.dtype == np.uint16
    _check(_cached(source, tmp_path / "root", words), tokenizer=words)
    inner = tokenizers.Tokenizer.from_str(words.to_json())
    inner.add_tokens([f"never{i}" for i in range(1 << 16)])
    wide = Subwords("wide", inner)
    assert _cached(source, tmp_path / "root", wide).tokens.dtype == np.uint32
    _check(_cached(source, tmp_path / "root", wide), tokenizer=wide)


def test_built_once_per_content_and_tokenizer(tmp_path, source, monkeypatch):
    root, built = tmp_path / "root", []
    real = cache_module._build
    monkeypatch.setattr(cache_module, "_build", lambda *a, **k: built.append(1) or real(*a, **k))
    first = _cached(source, root)
    assert _cached(open_source(str(source.files[0])), root).key == first.key
    assert len(built) == 1
    _cached(source, root, train_bpe(TEXTS, 270))
    assert len(built) == 2
    write_lines(tmp_path / "a.jsonl", [*TEXTS, "more"])
    _check(_cached(open_source(str(tmp_path / "a.jsonl")), root), [*TEXTS, "more"])
    assert len(built) == 3


def test_a_cache_that_is_there_needs_no_right_to_write(tmp_path, source, monkeypatch):
    _cached(source, tmp_path / "root")
    monkeypatch.setattr(cache_module, "_writing", lambda root: pytest.fail("written"))
    _check(_cached(source, tmp_path / "root"))


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "bytes.bin", "digests.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["short", "odd", "empty", "gone"])
def test_a_torn_cache_is_built_again(tmp_path, source, name, damage):
    torn = tmp_path / "root" / _cached(source, tmp_path / "root").key / name
    whole = torn.read_bytes()
    torn.unlink()
    if damage != "gone":
        # Eight bytes less are still whole numbers.
        torn.write_bytes({"short": whole[:-8], "odd": whole[:-1], "empty": b""}[damage])
    _check(_cached(source, tmp_path / "root"))
    assert torn.read_bytes() == whole


@pytest.mark.parametrize("meta", ["[]", "3", '{"sizes": 3}', '{"sizes": {}, "dtype": "unheard"}', '{"sizes": {}}'])
def test_nonsense_in_the_meta_file(tmp_path, source, meta):
    path = tmp_path / "root" / _cached(source, tmp_path / "root").key / "meta.json"
    path.write_text(meta)
    _check(_cached(source, tmp_path / "root"))


def test_an_empty_corpus_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(NormLabError, match=r"a\.txt: 1 file, 0\.0 MB: no text in it"):
        _cached(open_source(str(tmp_path / "a.txt")), tmp_path / "root")
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, source, monkeypatch, call):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(cache_module, "_write", full)
        elif call == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "mkdir", full)
        with pytest.raises(NormLabError, match=r"^token cache .*: no space left; free some or name another") as caught:
            _cached(source, tmp_path / "root")
    assert "\n" not in str(caught.value)
    left = [path.suffix for path in (tmp_path / "root").iterdir()] if (tmp_path / "root").exists() else []
    assert left in ([], [".lock"])
    _check(_cached(source, tmp_path / "root"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a Linux device")
def test_a_really_full_device(tmp_path, source, monkeypatch):
    real = open

    def full(path, *rest, **options):
        return real("/dev/full" if str(path).endswith("tokens.bin") else path, *rest, **options)

    monkeypatch.setattr(cache_module, "open", full, raising=False)
    with pytest.raises(NormLabError, match="no space left"):
        _cached(source, tmp_path / "root")
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_one(tmp_path, source):
    (tmp_path / "file").touch()
    with pytest.raises(NormLabError, match=r"token cache .*: (Not a directory|File exists)"):
        _cached(source, tmp_path / "file" / "root")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path, source, monkeypatch, error):
    def interrupted(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(encode_module, "encode_batch", interrupted)
        with pytest.raises(error):
            _cached(source, tmp_path / "root")
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read(tmp_path, source, monkeypatch):
    real = encode_module.encode_batch

    def touched(*given):
        os.utime(source.files[0], (1, 1))
        return real(*given)

    monkeypatch.setattr(encode_module, "encode_batch", touched)
    with pytest.raises(NormLabError, match="changed while it was being read"):
        _cached(source, tmp_path / "root")
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


class _Slow(Bytes):
    """Leaves a note and takes its time, so that a test can come in between."""

    def __init__(self, note: Path, seconds: float):
        self.note, self.seconds = note, seconds

    def encode_batch(self, texts):
        with open(self.note, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return super().encode_batch(texts)


def _build_in_a_process(data: str, root: Path, note: Path, seconds: float) -> None:
    # One document a chunk, so that the work has a middle.
    readers.CHUNK_BYTES = encode_module._BATCH_BYTES = 1
    cached_tokens(open_source(data), _Slow(note, seconds), root, workers=1, progress=False)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


@pytest.mark.full
def test_two_processes_build_it_once(tmp_path):
    data, root, note = str(write_lines(tmp_path / "a.jsonl", TEXTS[:30])), tmp_path / "root", tmp_path / "note"
    processes = [SPAWN.Process(target=_build_in_a_process, args=(data, root, note, 0.01)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    builders = note.read_text().split()
    assert len(builders) == 30
    assert len(set(builders)) == 1
    _check(_cached(open_source(data), root), TEXTS[:30])


@pytest.mark.full
def test_a_builder_killed_half_way(tmp_path):
    data, root, note = str(write_lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "root", tmp_path / "note"
    process = SPAWN.Process(target=_build_in_a_process, args=(data, root, note, 0.05))
    process.start()
    _wait_for(note)
    process.kill()
    process.join(60)
    assert [path.suffix for path in sorted(root.iterdir())] == [".lock", ".part"]
    # Another cache in the same folder clears it away too: the dead one may never be asked for again.
    with_other = write_lines(tmp_path / "b.jsonl", TEXTS[:3])
    _check(_cached(open_source(str(with_other)), root), TEXTS[:3])
    assert not list(root.glob("*.part"))
    _check(_cached(open_source(data), root))


def test_the_part_of_a_dead_builder_of_the_same_cache(tmp_path, source):
    root = tmp_path / "root"
    key = _cached(source, root).key
    (root / key).rename(root / f"{key}.part")
    (root / f"{key}.part" / "starts.bin").write_bytes(b"half")
    _check(_cached(source, root))
    assert not list(root.glob("*.part"))


def test_the_part_of_a_living_builder_is_left_alone(tmp_path, source):
    root = tmp_path / "root"
    (root / "other.part").mkdir(parents=True)
    with wait_for(root / "other.lock") as mine:
        assert mine
        _cached(source, root)
        assert (root / "other.part").exists()


def test_waiting_is_said(tmp_path, source, monkeypatch, capsys):
    def occupied(path, *, patient=True):
        return real(path) if patient else real(path.with_name("held"), patient=False)

    real = wait_for
    (tmp_path / "root").mkdir()
    with wait_for(tmp_path / "root" / "held"):
        monkeypatch.setattr(cache_module, "wait_for", occupied)
        _check(cached_tokens(source, Bytes(), tmp_path / "root", workers=1, progress=True))
    assert "waiting for another process that builds the same token cache" in capsys.readouterr().err


def test_progress_in_plain_lines(tmp_path, source, capsys):
    cached_tokens(source, Bytes(), tmp_path / "root", workers=1, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    began, ended = shown.err.splitlines()
    assert began == f"tokenising {source.describe()}"
    assert "tokens in" in ended


def test_progress_on_a_terminal(tmp_path, source, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    cached_tokens(source, Bytes(), tmp_path / "root", workers=1, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"tokenised {source.describe()}" in shown.err.splitlines()[-1]


def test_waiting_work_is_bounded(tmp_path, monkeypatch):
    """What is read but not yet written stays within a few chunks a worker, however long the source is."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 1)
    monkeypatch.setattr(encode_module, "_BATCH_BYTES", 1)
    read = []

    class Counted(Files):
        def chunks(self):
            for chunk in super().chunks():
                read.append(chunk)
                yield chunk

    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    ahead = 0
    pieces = encode_module.encode(Counted("a", tmp_path, [path]), Bytes(), workers=2, progress=False)
    for written, _ in enumerate(pieces, 1):
        ahead = max(ahead, len(read) - written)
    assert ahead <= 2 * 2 + 1


def test_tokenizers_by_name(tmp_path, source):
    root = tmp_path / "root"
    assert cached_tokenizer("bytes", source, root, progress=False).name == "bytes"
    trained = cached_tokenizer("bpe:270", source, root, progress=False)
    assert (trained.name, trained.vocab_size) == ("bpe:270", 270)
    assert trained.fingerprint == train_bpe(TEXTS, 270).fingerprint
    trained.save(tmp_path / "mine.json")
    assert (
        cached_tokenizer(str(tmp_path / "mine.json"), source, root, progress=False).fingerprint == trained.fingerprint
    )
    with pytest.raises(NormLabError, match=r"absent\.json: cannot be read"):
        cached_tokenizer("absent.json", source, root, progress=False)
    for slip, meant in (("byte", "bytes"), ("Bytes", "bytes"), ("bpe", "bpe:N")):
        with pytest.raises(NormLabError, match=f"unknown tokenizer '{slip}'; did you mean '{meant}'"):
            cached_tokenizer(slip, source, root, progress=False)


def test_a_tokenizer_is_trained_once(tmp_path, source, monkeypatch, capsys):
    first = cached_tokenizer("bpe:270", source, tmp_path / "root", progress=True)
    assert "training a tokenizer of 270 entries" in capsys.readouterr().err
    monkeypatch.setattr(cache_module, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert cached_tokenizer("bpe:270", source, tmp_path / "root", progress=True).fingerprint == first.fingerprint


def test_a_broken_line_is_named_while_a_tokenizer_is_trained(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{broken')
    with pytest.raises(NormLabError, match=r"^a\.jsonl, line 2: not JSON"):
        cached_tokenizer("bpe:270", open_source(str(tmp_path / "a.jsonl")), tmp_path / "root", progress=False)


def test_where_caches_live(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    assert cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("NORMLAB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "normlab" / "tokens"
