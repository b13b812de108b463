"""The loader: every token once an epoch, the same line for any number of ranks, resumed at the exact token."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normlab.data import IGNORED, Batch, Loader, evaluation_batches
from normlab.data.batch_loader import batches
from normlab.data.loader import TextSamples
from normlab.data.windows import Stream, Windows, shuffled
from normlab.errors import NormLabError
from normlab.models.tokens import document_mask
from tests.data.helpers import END, tokens_of
from tests.matrix import parametrize

LENGTHS = [5, 1, 40, 2, 17, 9, 1, 33, 12]
LENGTH_LISTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def _loader(**options: Any) -> Loader:
    defaults: dict[str, Any] = {"length": 8, "batch": 2, "seed": 3, "prefetch": 0}
    return Loader(tokens_of(LENGTHS), **defaults | options)


def _take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def _rows(batches: list[Batch]) -> list[list[int]]:
    return torch.cat([torch.cat([b.inputs, b.targets], 1) for b in batches]).tolist()


def _check_equal(one: Batch, other: Batch) -> None:
    for mine, yours in zip(one, other, strict=True):
        assert mine is not None
        assert yours is not None
        assert torch.equal(mine.cpu(), yours)


def _plain_stream(tokens, order) -> list[int]:
    documents = [tokens.ids[tokens.starts[i] : tokens.starts[i] + tokens.lengths[i]].tolist() for i in order]
    return [END, *itertools.chain(*documents)]


@given(LENGTH_LISTS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_stream_reads_like_plain_lists(lengths, length, random):
    tokens = tokens_of(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    plain = _plain_stream(tokens, order)
    owner = [0, *itertools.chain(*([place] * lengths[i] for place, i in enumerate(order, 1)))]
    begins = [begin for begin in range(len(plain)) if begin + length < len(plain)]
    found = Stream(tokens, np.array(order)).read(np.array(begins, np.int64), length)
    assert found.inputs.tolist() == [plain[b : b + length] for b in begins]
    assert found.targets.tolist() == [plain[b + 1 : b + length + 1] for b in begins]
    assert found.documents.tolist() == [owner[b + 1 : b + length + 1] for b in begins]


@given(LENGTH_LISTS, st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_predicts_every_token_once(lengths, length, epoch):
    tokens = tokens_of(lengths)
    if tokens.n_tokens < length:
        return
    windows = Windows(tokens, length=length, seed=1)
    found = windows.read(epoch * windows.per_epoch, windows.per_epoch).targets.flatten()
    assert len(found) == tokens.n_tokens // length * length
    text = found[found != END]
    assert len(set(text.tolist())) == len(text)
    assert (found == END).sum() <= len(lengths)
    assert tokens.n_tokens - len(found) < length


def test_epochs_and_seeds_have_orders_of_their_own():
    per_epoch = Windows(tokens_of(LENGTHS), length=8, seed=0).per_epoch
    orders = set()
    for seed in (0, 1, -1, 2**40):
        windows = Windows(tokens_of(LENGTHS), length=8, seed=seed)
        orders |= {tuple(windows.read(epoch * per_epoch, per_epoch).inputs.flatten()) for epoch in range(3)}
    assert len(orders) == 12


def test_going_back_an_epoch_gives_the_same():
    windows = Windows(tokens_of(LENGTHS), length=8, seed=0)
    first = windows.read(0, 5).inputs
    windows.read(3 * windows.per_epoch, 5)
    np.testing.assert_array_equal(windows.read(0, 5).inputs, first)


def test_shuffling_is_a_permutation_that_no_version_changes():
    for count in (0, 1, 2, 1000):
        assert sorted(shuffled(count, 7, 2, "windows")) == list(range(count))
    # Every place is taken by every item about equally often: 5 standard deviations of a binomial over 4000 shuffles.
    seen = np.array([shuffled(5, seed, 0, "windows") for seed in range(4000)])
    counts = np.array([[(seen[:, place] == item).sum() for item in range(5)] for place in range(5)])
    assert np.abs(counts - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)
    assert shuffled(8, 1, 2, "windows").tolist() == _reference_shuffle(8, 1, 2, b"windows")


def _reference_shuffle(count: int, seed: int, epoch: int, what: bytes) -> list[int]:
    """The same with Python's whole numbers: splitmix64 as published."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = mix(int.from_bytes(what, "little"))
    for number in (seed, epoch):
        key = mix(key ^ number)
    return sorted(range(count), key=lambda i: mix(i ^ key))


def test_a_batch_mixes_long_documents():
    """Two documents of many windows: in their own order a batch of 8 would nearly always hold one of them alone."""
    tokens = tokens_of([4000, 4000])
    with Loader(tokens, length=8, batch=8, seed=0) as loader:
        mixed = [len({int(row) >= 5000 for row in batch.inputs[:, 0]}) == 2 for batch in _take(loader, 50)]
    # All eight from one document: 2 · 2^-8 of batches, so that more than 5 of 50 is out of the question.
    assert sum(mixed) >= 45


def test_targets_follow_inputs():
    for batch in _take(_loader(), 40):
        assert batch.inputs.shape == batch.targets.shape == (2, 8)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.documents is None
        torch.testing.assert_close(batch.inputs[:, 1:], batch.targets[:, :-1], rtol=0, atol=0)


@pytest.mark.parametrize(("world", "batch"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_ranks_share_one_line(world, batch):
    expected = _rows(_take(_loader(batch=8), 12))
    ranks = [_take(_loader(batch=batch, rank=rank, world=world), 12) for rank in range(world)]
    assert _rows([ranks[rank][step] for step in range(12) for rank in range(world)]) == expected


@parametrize("prefetch", [0, 1, 4], quick=[0, 4])
@parametrize("steps", [0, 1, 7, 30], quick=[0, 1, 30])
@pytest.mark.parametrize(("world", "batch"), [(1, 4), (2, 2), (1, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("before", [1, 2])
def test_resume_at_the_exact_token(prefetch, steps, world, batch, before):
    line = _rows(_take(_loader(batch=1), 200))
    with _loader(batch=4 // before, world=before, rank=before - 1, prefetch=prefetch) as first:
        _take(first, steps)
        state = first.state_dict()
    assert state["sequence"] == 4 * steps
    ranks = []
    for rank in range(world):
        with _loader(batch=batch, world=world, rank=rank, prefetch=prefetch) as loader:
            loader.load_state_dict(state)
            ranks.append(_take(loader, 5))
    found = _rows([ranks[rank][step] for step in range(5) for rank in range(world)])
    assert found == line[4 * steps : 4 * steps + 5 * world * batch]


def test_resume_in_the_middle_of_a_loader():
    with _loader(prefetch=3) as loader:
        start = loader.state_dict()
        before = _rows(_take(loader, 6))
        loader.load_state_dict(start)
        assert _rows(_take(loader, 6)) == before


def test_another_corpus_seed_or_length_is_refused():
    state = _loader().state_dict()
    with pytest.raises(NormLabError, match="cannot resume on another seed: saved with seed 3, this has 4"):
        _loader(seed=4).load_state_dict(state)
    with pytest.raises(NormLabError, match="cannot resume on another length: saved with length 8, this has 9"):
        _loader(length=9).load_state_dict(state)
    other = Loader(tokens_of(LENGTHS, fingerprint="other"), length=8, batch=2, seed=3)
    with pytest.raises(NormLabError, match="cannot resume on another corpus"):
        other.load_state_dict(state)
    with pytest.raises(NormLabError, match="cannot resume"):
        _loader().load_state_dict({})


def test_epochs_are_counted():
    loader = _loader(batch=3)
    assert loader._samples.per_epoch == sum(LENGTHS) // 8 == 15
    _take(loader, 10)
    assert loader.epoch == 2.0


def test_respected_boundaries_are_the_same_windows():
    packed, respected = _take(_loader(), 20), _take(_loader(boundaries="respected"), 20)
    assert _rows(packed) == _rows(respected)
    tokens = tokens_of(LENGTHS)
    owner = dict(zip(tokens.ids.tolist(), np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist(), strict=True))
    checked = 0
    for batch in respected:
        assert batch.documents is not None
        mask = document_mask(batch.documents)
        for row, column, other in itertools.product(range(2), range(8), range(8)):
            target, seen = int(batch.targets[row, column]), int(batch.inputs[row, other])
            if mask[row, 0, column, other] and END not in (target, seen):
                checked += 1
                assert owner[target] == owner[seen]
    assert checked > 500


def test_an_end_opens_the_next_document():
    """Nothing but the end token stands before the first token of a document, and the end closes its own."""
    found = Stream(tokens_of([3, 2, 4]), np.arange(3)).read(np.array([0]), 9)
    assert found.inputs.tolist() == [[END, 1000, 1001, END, 1003, END, 1005, 1006, 1007]]
    assert found.targets.tolist() == [[1000, 1001, END, 1003, END, 1005, 1006, 1007, END]]
    assert found.documents.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 121}, "the data has 120 tokens, fewer than one window of 121; try --length 120"),
        ({"length": 0}, "length must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"world": 0}, "world must be at least 1"),
        ({"rank": 2, "world": 2}, "rank must lie in 0 to 1 for a world of 2, got 2"),
        ({"rank": -1}, "rank must lie in 0 to 0"),
        ({"boundaries": "respect"}, "unknown boundaries 'respect'; did you mean 'respected'"),
        ({"prefetch": -1}, "prefetch must be 0 or more"),
    ],
)
def test_bad_input_gets_one_clear_line(options, message):
    with pytest.raises(NormLabError, match=message):
        _loader(**options)


def test_the_longest_window_and_a_batch_of_several_epochs():
    loader = _loader(length=120, batch=5)
    batch = next(loader)
    assert loader.epoch == 5.0
    for row in batch.targets.tolist():
        assert sorted(row) == sorted(tokens_of(LENGTHS).ids.tolist())


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_closing_ends_the_thread():
    with _loader(prefetch=2) as loader:
        next(loader)
        assert len(_threads()) == 1
        state = loader.state_dict()
    assert not _threads()
    loader.close()
    assert loader.state_dict() == state
    line = _rows(_take(_loader(), 2))
    assert _rows([next(loader)]) == line[2:]
    loader.close()


def test_a_forgotten_loader_ends_its_thread():
    loader = _loader(prefetch=2)
    next(loader)
    del loader
    gc.collect()
    deadline = time.monotonic() + 30
    while _threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_breaks_in_the_thread_is_raised_here(monkeypatch):
    real = Windows.read

    def broken(self, first, count):
        if first >= 6:
            raise OSError("the disk went away")
        return real(self, first, count)

    monkeypatch.setattr(Windows, "read", broken)
    loader = _loader(prefetch=4)
    # The three batches before it are still good.
    assert len(_take(loader, 3)) == 3
    with pytest.raises(OSError, match="the disk went away"):
        next(loader)
    assert not _threads()
    assert loader.state_dict()["sequence"] == 6


def test_prefetch_changes_nothing():
    with _loader(prefetch=3, boundaries="respected") as ahead:
        found = _take(ahead, 50)
    for one, other in zip(found, _take(_loader(boundaries="respected"), 50), strict=True):
        _check_equal(one, other)


@pytest.mark.parametrize("boundaries", ["packed", "respected"])
def test_batches_reach_another_device(boundaries):
    batch = next(_loader(device="meta", boundaries=boundaries))
    assert {tensor.device.type for tensor in batch if tensor is not None} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_batches_on_a_gpu():
    line = TextSamples(tokens_of(LENGTHS), length=8, seed=3)
    assert next(batches(line, 0, 2, 1, pinned=True)).inputs.is_pinned()
    with _loader(device="cuda", boundaries="respected", prefetch=4) as loader:
        found = _take(loader, 50)
    for one, other in zip(found, _take(_loader(boundaries="respected"), 50), strict=True):
        _check_equal(one, other)


@given(LENGTH_LISTS, st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(1, 50))
def test_evaluation_predicts_each_token_exactly_once(lengths, length, batch, world, most):
    tokens = tokens_of(lengths)
    options = {"length": length, "batch": batch, "world": world, "max_tokens": most}
    ranks = [list(evaluation_batches(tokens, rank=rank, **options)) for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1
    inputs, targets = [], []
    for one in itertools.chain(*zip(*ranks, strict=True)):
        assert one.inputs.shape == one.targets.shape == (batch, length)
        scored = one.targets != IGNORED
        inputs += one.inputs[scored].tolist()
        targets += one.targets[scored].tolist()
    plain = _plain_stream(tokens, range(len(lengths)))[: (most or tokens.n_tokens) + 1]
    assert inputs == plain[:-1]
    assert targets == plain[1:]


def test_evaluation_with_boundaries():
    (batch,) = evaluation_batches(tokens_of([3, 2]), length=4, batch=2, boundaries="respected")
    assert batch.documents is not None
    assert batch.documents.tolist() == [[1, 1, 1, 2], [2, -1, -1, -1]]
    assert batch.targets.tolist()[1] == [END, IGNORED, IGNORED, IGNORED]
    with pytest.raises(NormLabError, match="max_tokens must be at least 1"):
        list(evaluation_batches(tokens_of([3]), length=4, batch=1, max_tokens=0))
