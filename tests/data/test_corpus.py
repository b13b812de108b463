"""Corpora: no document on both sides, bits per byte by hand, one line where nothing can be split."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from normlab.data import Tokens, evaluation_batches, prepare
from normlab.errors import NormLabError
from tests.data.helpers import write_lines

TEXTS = [f"text number {i} with ä" for i in range(500)]


def _prepared(tmp_path, texts, name="a.jsonl", **options):
    path = write_lines(tmp_path / name, texts)
    return prepare([str(path)], cache=tmp_path / "cache", workers=1, progress=False, **options)


def _documents(tokens: Tokens, tokenizer) -> list[str]:
    ranges = zip(tokens.starts, tokens.lengths, strict=True)
    return [tokenizer.decode(tokens.ids[start : start + length]) for start, length in ranges]


def _share(text: str) -> Fraction:
    return Fraction(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16), 1 << 64)


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
def test_the_side_follows_from_the_content(tmp_path, fraction):
    corpus = _prepared(tmp_path, TEXTS, val_fraction=fraction)
    held_out = [text for text in TEXTS if _share(text) < Fraction(fraction)]
    assert _documents(corpus.val, corpus.tokenizer) == held_out
    assert _documents(corpus.train, corpus.tokenizer) == [text for text in TEXTS if text not in held_out]
    assert corpus.val.n_bytes == sum(len(text.encode()) for text in held_out)
    assert corpus.train.n_tokens == corpus.train.n_bytes + corpus.train.n_documents
    # A binomial share: 5 standard deviations of 500 draws.
    assert abs(len(held_out) / 500 - fraction) < 5 * math.sqrt(fraction * (1 - fraction) / 500)


def test_order_and_copies_do_not_matter(tmp_path):
    one = _prepared(tmp_path, TEXTS, "one.jsonl")
    other = _prepared(tmp_path, [*reversed(TEXTS), *TEXTS], "other.jsonl")
    sides = [set(_documents(corpus.val, corpus.tokenizer)) for corpus in (one, other)]
    assert sides[0] == sides[1]
    assert other.val.n_documents == 2 * one.val.n_documents
    assert not sides[1] & set(_documents(other.train, other.tokenizer))


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_neither_side_is_empty(tmp_path, fraction):
    corpus = _prepared(tmp_path, ["a", "b"], val_fraction=fraction)
    assert _documents(corpus.val, corpus.tokenizer) == [min("ab", key=_share)]
    assert _documents(corpus.train, corpus.tokenizer) == [max("ab", key=_share)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.5])
def test_one_document_gives_its_end(tmp_path, tokenizer, fraction):
    text = "Füße über Äcker und Wälder. " * 30 + "🙂" * 40
    corpus = _prepared(tmp_path, [text], val_fraction=fraction, tokenizer=tokenizer)
    head, tail = _documents(corpus.train, corpus.tokenizer)[0], _documents(corpus.val, corpus.tokenizer)[0]
    assert head + tail == text
    assert (corpus.train.n_bytes, corpus.val.n_bytes) == (len(head.encode()), len(tail.encode()))
    total = corpus.train.n_tokens + corpus.val.n_tokens
    assert total == len(corpus.train.ids)
    # A character has at most four bytes, so that at most three tokens move to its other side.
    assert 0 <= max(1, round(fraction * total)) - corpus.val.n_tokens <= 3
    assert corpus.train.fingerprint != corpus.val.fingerprint


def test_what_cannot_be_split(tmp_path):
    with pytest.raises(NormLabError, match="all documents are the same text"):
        _prepared(tmp_path, ["a", "a"])
    with pytest.raises(NormLabError, match="one document of 2 tokens cannot be split"):
        _prepared(tmp_path, ["a"], val_fraction=0.99)
    for fraction in (0.0, 1.0, -1, float("nan")):
        with pytest.raises(NormLabError, match="val_fraction must lie between 0 and 1"):
            _prepared(tmp_path, ["a", "b"], val_fraction=fraction)
    with pytest.raises(NormLabError, match="workers must be at least 1, got 0"):
        prepare(["python"], workers=0)


def test_validation_data_of_its_own(tmp_path):
    apart = write_lines(tmp_path / "val.jsonl", [*TEXTS[:3], "new"])
    corpus = _prepared(tmp_path, TEXTS, val_data=[str(apart)])
    assert _documents(corpus.val, corpus.tokenizer) == [*TEXTS[:3], "new"]
    # What is in both would be seen in training.
    assert _documents(corpus.train, corpus.tokenizer) == TEXTS[3:]
    with pytest.raises(NormLabError, match="every document of data is in val_data or val_sets too"):
        _prepared(tmp_path, TEXTS[:2], val_data=[str(apart)])


def test_fingerprints(tmp_path):
    base = _prepared(tmp_path, TEXTS)
    assert base.fingerprint == _prepared(tmp_path, TEXTS).fingerprint
    others = [
        _prepared(tmp_path, TEXTS, val_fraction=0.5),
        _prepared(tmp_path, TEXTS, tokenizer="bpe:280"),
        _prepared(tmp_path, [*TEXTS, "more"]),
        _prepared(tmp_path, TEXTS, val_data=[str(write_lines(tmp_path / "val.jsonl", ["x"]))]),
    ]
    assert len({corpus.fingerprint for corpus in (base, *others)}) == 5
    assert base.train.fingerprint != base.val.fingerprint


def test_bits_per_byte_by_hand():
    # Two documents, "aé" (3 bytes) and "b" (1 byte): with their ends 6 tokens to predict, over 4 bytes.
    ids = np.array([97, 0xC3, 0xA9, 256, 98, 256], np.uint16)
    tokens = Tokens(ids, np.array([0, 4]), np.array([4, 2]), n_bytes=4, fingerprint="")
    assert tokens.bytes_per_token == 4 / 6
    # One bit a token is 6 bits over 4 bytes.
    assert tokens.bits_per_byte(math.log(2)) == pytest.approx(1.5, rel=1e-15)
    assert tokens.bits_per_byte(0.0) == 0.0
    assert math.isnan(tokens.bits_per_byte(math.nan))


def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path):
    """Uniform over the vocabulary, measured through the evaluation batches as training does."""
    corpus = _prepared(tmp_path, TEXTS)
    nats, count = 0.0, 0
    for batch in evaluation_batches(corpus.val, length=7, batch=3):
        logits = torch.zeros(batch.targets.numel(), 257, dtype=torch.float64)
        nats += torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum").item()
        count += int((batch.targets != -100).sum())
    documents = _documents(corpus.val, corpus.tokenizer)
    n_bytes = sum(len(text.encode()) for text in documents)
    expected = (n_bytes + len(documents)) * math.log2(257) / n_bytes
    # A sum of `count` equal terms rounds each time: count · eps.
    assert corpus.val.bits_per_byte(nats / count) == pytest.approx(expected, rel=count * 2.3e-16)


def test_what_a_person_and_a_report_read(tmp_path):
    corpus = _prepared(tmp_path, ["a", "b"])
    assert "\n" not in corpus.describe()
    assert "bytes (257 entries); train 2 tokens, 1 documents" in corpus.describe()
    facts = corpus.facts()
    assert facts["train"] == facts["val"] == {"documents": 1, "tokens": 2, "bytes": 1}
    assert facts["tokenizer"] == {"name": "bytes", "vocab_size": 257}


def test_the_default_text(tmp_path):
    corpus = prepare(["python"], cache=tmp_path, progress=False)
    assert corpus.train.n_tokens > 5_000_000
    assert 0.002 < corpus.val.n_tokens / corpus.train.n_tokens < 0.1
