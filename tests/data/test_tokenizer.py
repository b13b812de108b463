"""Tokenizers: every text comes back byte for byte, the same data gives the same entries, a file carries all of it."""

from __future__ import annotations

import gzip
import importlib
import lzma
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from normlab.data import tokenizer
from normlab.data import tokenizer as tokenizer_module
from normlab.data.tokenizer import (
    END,
    Bytes,
    Subwords,
    bpe_size,
    is_tokenizer_file,
    load_from_hub,
    load_tokenizer,
    one_thread_a_call,
    train_bpe,
)
from normlab.errors import NormLabError

TEXTS = ["the cat sat on the mat and the dog sat on the log. " * 20, "übergrößen und über Größe\n\n\tnachdenken " * 20]
BPE = train_bpe(TEXTS, 300)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def test_bytes_are_utf8():
    words = Bytes()
    assert words.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert words.decode([97, 0xC3, 0xA9, 256]) == "aé"
    assert words.decode([0xC3]) == "\ufffd"
    assert (words.vocab_size, words.end, words.dtype) == (257, 256, np.uint16)


@given(ANY_TEXT)
def test_any_text_comes_back(text):
    for words in (Bytes(), BPE):
        ids = words.encode(text)
        assert ids.dtype == words.dtype
        assert words.end not in ids
        assert words.decode(ids) == text


@pytest.mark.parametrize("text", ["", END, f"a{END}b", "\x00", " \n \r\n\t ", "\ufeff", "a" * 10_000])
def test_awkward_texts_come_back(text):
    for words in (Bytes(), BPE):
        ids = words.encode(text)
        assert words.end not in ids
        assert words.decode([*ids, words.end]) == text


def test_training_is_deterministic_and_exact():
    again = train_bpe(iter(TEXTS), 300)
    assert again.fingerprint == BPE.fingerprint
    assert again.vocab_size == 300
    assert BPE.fingerprint != train_bpe(TEXTS, 299).fingerprint
    # The most frequent pair of the first text, by count: "t"+"h" follows a space 60 times, as often as "th"+"e".
    assert len(BPE.encode("the")) == 1
    assert sum(map(len, BPE.encode_batch(TEXTS))) < sum(map(len, Bytes().encode_batch(TEXTS))) / 2


def test_too_many_entries_for_the_data():
    with pytest.raises(NormLabError, match=r"bpe:30000: the data has only \d+ entries in it; try bpe:\d+ or more data"):
        train_bpe(TEXTS, 30_000)


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
def test_pieces_change_nothing(monkeypatch, piece):
    texts = [*TEXTS, "a  b   c 1 2 33 _ x_ y", "word", "", "no-space" * 30, "don't we'll  \n it's 3 o'clock"]
    whole = BPE.encode_batch(texts)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", piece)
    for expected, found in zip(whole, BPE.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("words", [Bytes(), BPE], ids=["bytes", "bpe"])
def test_a_file_carries_it(tmp_path, words):
    path = tmp_path / "tokenizer.json"
    words.save(path)
    assert list(tmp_path.iterdir()) == [path]
    found = load_tokenizer(path)
    assert (found.fingerprint, found.vocab_size, found.end) == (words.fingerprint, words.vocab_size, words.end)
    assert found.encode("the über\x00").tolist() == words.encode("the über\x00").tolist()
    for suffix, compress in ((".gz", gzip.compress), (".xz", lzma.compress)):
        packed = tmp_path / f"tokenizer.json{suffix}"
        packed.write_bytes(compress(path.read_bytes()))
        assert load_tokenizer(packed).fingerprint == words.fingerprint


def _word_level(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))


def test_the_end_of_other_tokenizers():
    known = Subwords("known", _word_level({"?": 0, "a": 1, "</s>": 2}))
    assert (known.end, known.vocab_size) == (2, 3)
    added = Subwords("added", _word_level({"?": 0, "a": 1}))
    assert (added.end, added.vocab_size) == (2, 3)
    gaps = Subwords("gaps", _word_level({"?": 0, "a": 99_999, "</s>": 2}))
    assert (gaps.vocab_size, gaps.dtype) == (100_000, np.uint32)


def test_truncation_and_padding_of_a_file_are_not_kept():
    inner = tokenizers.Tokenizer.from_str(BPE.to_json())
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    assert Subwords("cut", inner).encode(TEXTS[0]).tolist() == BPE.encode(TEXTS[0]).tolist()


@pytest.mark.parametrize(
    ("content", "message"), [(b"{}", "not a file of the tokenizers"), (b"\xff", "not a file"), (b"", "not")]
)
def test_a_broken_file(tmp_path, content, message):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(NormLabError, match=message) as caught:
        load_tokenizer(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(NormLabError, match=r"t\.json: cannot be read: No such file"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(NormLabError, match=r"is a folder; name the file in it, e\.g\. .*/tokenizer\.json$"):
        is_tokenizer_file(str(tmp_path))


def test_without_a_network_the_hub_is_not_asked(monkeypatch, tmp_path):
    def asked(name):
        raise AssertionError("it would try for half a minute")

    kept = tmp_path / "tokenizer.json"
    BPE.save(kept)
    monkeypatch.setattr(tokenizer, "is_reachable", lambda: False)
    monkeypatch.setattr(tokenizer, "cached_file", lambda name, file: kept if name == "some/one" else None)
    assert load_from_hub("some/one").fingerprint == BPE.fingerprint
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=asked))
    with pytest.raises(NormLabError, match=r"^tokenizer 'gpt9' is neither .* cannot be reached; expected 'by"):
        load_from_hub("gpt9")


def test_the_hub(monkeypatch):
    monkeypatch.setattr(tokenizer, "is_reachable", lambda: True)
    inner = tokenizers.Tokenizer.from_str(BPE.to_json())

    def offline(name):
        raise Exception("connection refused\nhint")

    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=offline))
    with pytest.raises(
        NormLabError, match=r"tokenizer 'byte' is not a file here, .*\(connection refused\); expected 'bytes'"
    ):
        load_from_hub("byte")
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=lambda name: inner))
    assert load_from_hub("gpt2").fingerprint == BPE.fingerprint


@pytest.mark.parametrize(
    "spec", ["bpe:", "bpe:many", "bpe:256", "bpe:-3", "bpe:1e4", "bpe:4000001", "bpe:" + 5000 * "9"]
)
def test_sizes_that_cannot_be(spec):
    with pytest.raises(NormLabError, match="expected 257 to 4,000,000 entries"):
        bpe_size(spec)


def test_sizes():
    assert bpe_size("bpe:257") == 257
    assert bpe_size("bpe") is bpe_size("bytes") is bpe_size("org/bpe:3") is None


def test_without_the_package(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(NormLabError, match=r'needs tokenizers, which is missing; try: pip install "normlab\[bpe\]"'):
        train_bpe(TEXTS, 300)
    with pytest.raises(NormLabError, match="needs tokenizers"):
        load_from_hub("gpt2")


@pytest.mark.parametrize("before", [None, "true"])
def test_the_environment_is_left_as_it_was(monkeypatch, before):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with one_thread_a_call():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize("words", [Bytes(), BPE], ids=["bytes", "bpe"])
@given(text=ANY_TEXT)
def test_as_an_object_of_the_package_it_is_the_same(words, text):
    # Written out, the end of a document is its token in a prompt, and mere letters in a document.
    assume(words is not BPE or END not in text)
    inner = words.as_package()
    assert inner.encode(text).ids == words.encode(text).tolist()
    assert inner.decode(inner.encode(text).ids) == text
    assert inner.id_to_token(words.end) == END
    assert inner.get_vocab_size() == words.vocab_size


def test_the_end_of_a_document_written_out_is_its_token_in_the_package_alone():
    assert BPE.as_package().encode(END).ids == [BPE.end]
    assert BPE.end not in BPE.encode(END).tolist()


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_decoded_alike(data):
    assert Bytes().as_package().decode(list(data)) == Bytes().decode(data)
