"""Bits per byte: windows, a direct computation in float64, closed forms, and their standard error."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from normlab import Decoder, DecoderConfig, NormLabError
from normlab.data.tokenizer import Bytes
from normlab.evaluation import EvaluationConfig
from normlab.evaluation.bits import Text, bits_per_byte
from normlab.evaluation.windows import WindowSum, window_sums, windows


def decoder(**changes: Any) -> Decoder:
    sizes: dict[str, Any] = {"depth": 2, "dim": 16, "heads": 2, "vocab_size": 257, "max_length": 16, "init_std": 0.3}
    return Decoder(DecoderConfig(**sizes | changes)).double().eval()


@pytest.mark.parametrize(
    ("tokens", "length", "stride"), [(1, 8, 4), (8, 8, 4), (9, 8, 4), (50, 8, 8), (50, 8, 3), (5, 1, 1)]
)
def test_every_token_is_scored_once_with_enough_before_it(tokens, length, stride):
    found = list(windows(tokens, length, stride))
    assert [place for window in found for place in range(window.first, window.stop)] == list(range(tokens))
    assert all(0 < window.stop - window.start <= length for window in found)
    for window in found[1:]:
        assert window.first - window.start >= length - stride


@torch.no_grad()
@pytest.mark.parametrize(("length", "stride", "batch"), [(8, 4, 3), (8, 8, 1), (8, 3, 2), (16, 8, 8)])
def test_the_sum_is_that_of_one_token_at_a_time(length, stride, batch):
    model, ids = decoder(), np.random.default_rng(0).integers(0, 257, 39)
    expected = 0.0
    for place in range(len(ids) - 1):
        # The first window that holds this token.
        start = 0 if place < length else stride * math.ceil((place + 1 - length) / stride)
        logits = model(torch.tensor(ids[None, start : place + 1]))[0, -1]
        expected -= float(logits.log_softmax(-1)[ids[place + 1]])
    parts = [part for parts in window_sums(model, ids, length=length, stride=stride, batch=batch) for part in parts]
    assert sum(part.tokens for part in parts) == len(ids) - 1
    # Two orders of the same sums of 38 terms in float64.
    assert sum(part.nats for part in parts) == pytest.approx(expected, rel=1e-10)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary(tmp_path):
    model = decoder()
    torch.nn.init.zeros_(model._head_matrix)
    text = "naïve ☃ text, " * 9
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    subject: Any = SimpleNamespace(decoder=model, tokenizer=Bytes(), length=16, longest=16, path="run")
    question = Text(str(tmp_path / "a.txt"), EvaluationConfig(runs=("run",), bits=("a",), stride=5))
    (score,) = question.evaluate(subject, progress=False)
    assert score.value == pytest.approx(math.log2(257), rel=1e-12)
    assert score.stderr == pytest.approx(0.0, abs=1e-12)
    assert score.samples == 1 + math.ceil((len(text.encode()) - 16) / 5)


def test_standard_error_of_equal_windows_is_that_of_their_mean():
    nats = np.random.default_rng(0).normal(20.0, 3.0, 40)
    score = bits_per_byte("text", [WindowSum(float(value), 10) for value in nats], 40 * 5)
    # Five bytes a window: bits per byte is the mean of the windows' own.
    own = nats / 5 / math.log(2)
    assert score.value == pytest.approx(own.mean())
    assert score.stderr == pytest.approx(own.std(ddof=1) / math.sqrt(40))


def test_one_window_has_no_standard_error_and_no_text_no_score():
    assert bits_per_byte("text", [WindowSum(3.0, 2)], 2).stderr is None
    with pytest.raises(NormLabError, match="holds no text"):
        bits_per_byte("text", [], 0)
