"""Tokenising in processes: the same tokens in the same order, errors as in a thread, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from normlab.data import encode as encode_module
from normlab.data import open_source, readers
from normlab.data.encode import encode
from normlab.data.encode_process import EncodeProcess
from normlab.data.sources import Files
from normlab.data.tokenizer import Bytes, train_bpe
from normlab.errors import NormLabError
from tests.data.helpers import write_lines

TEXTS = [f"document {i}: " + "äbc <|endoftext|> " * (i % 7) for i in range(60)]


@pytest.fixture
def processes(monkeypatch):
    """Every file is worth a process; returns those that are started."""
    started: list[EncodeProcess] = []

    class Noted(EncodeProcess):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            started.append(self)

    monkeypatch.setattr(readers, "CHUNK_BYTES", 64)
    monkeypatch.setattr(encode_module, "_BATCH_BYTES", 256)
    monkeypatch.setattr(encode_module, "_PROCESS_BYTES", 1)
    monkeypatch.setattr(encode_module, "EncodeProcess", Noted)
    return started


@pytest.mark.parametrize("tokenizer", [Bytes(), train_bpe(TEXTS, 270)], ids=["bytes", "bpe"])
def test_the_same_tokens_as_in_this_process(tmp_path, processes, tokenizer):
    source = open_source(str(write_lines(tmp_path / "a.jsonl", TEXTS)))
    found = list(encode(source, tokenizer, workers=2, progress=False))
    expected = [token for text in TEXTS for token in (*tokenizer.encode(text), tokenizer.end)]
    assert np.concatenate([piece.ids for piece in found]).tolist() == expected
    assert 1 <= len(processes) <= 2
    assert all(one._process.poll() == 0 for one in processes)


def test_python_files_can_be_sent(processes):
    whole = open_source("python")
    assert isinstance(whole, Files)
    source = Files("python", Path(sysconfig.get_paths()["stdlib"]), whole.files[:20], python=True)
    found = np.concatenate([piece.ids for piece in encode(source, Bytes(), workers=2, progress=False)])
    assert processes
    assert bytes(found[found < 256].astype(np.uint8)).decode() == "".join(document.text for document in source)


def test_an_error_of_a_text_is_the_same_line(tmp_path, processes):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(NormLabError, match=r"a\.jsonl, line 61: not JSON"):
        list(encode(open_source(str(path)), Bytes(), workers=2, progress=False))
    assert all(one._process.poll() is not None for one in processes)


def test_a_killed_process_is_one_line():
    process = EncodeProcess(Bytes())
    process.encode([])
    process._process.kill()
    with pytest.raises(NormLabError, match="a process that tokenises ended with code -9"):
        process.encode([])
    process.close()


def test_a_small_source_starts_no_process(tmp_path, processes, monkeypatch):
    monkeypatch.setattr(encode_module, "_PROCESS_BYTES", 1 << 22)
    source = open_source(str(write_lines(tmp_path / "a.jsonl", TEXTS)))
    assert list(encode(source, Bytes(), workers=2, progress=False))
    assert not processes


def test_a_process_imports_no_torch():
    code = "import sys, normlab.data.encode_process; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
