"""Work on one thread: within the context alone, also if it fails, and where the ranks of a profile are computed."""

from __future__ import annotations

import pytest
import torch

from normlab.models import DecoderConfig
from normlab.probes import pooling
from normlab.train.monitor.profile import profile
from normlab.utils.threads import one_thread


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_outside(three_threads):
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with one_thread(when=False):
        assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), one_thread():
        _ = 1 / 0
    assert torch.get_num_threads() == 3


def test_ranks_of_a_profile_are_computed_on_one_thread(three_threads, monkeypatch):
    """Many threads take ten times as long for a matrix of 256."""
    seen, ranks = [], pooling.ranks
    monkeypatch.setattr(pooling, "ranks", lambda products: seen.append(torch.get_num_threads()) or ranks(products))
    tokens = torch.randint(0, 64, (2, 9))
    profile(DecoderConfig(depth=2, dim=16, heads=2, vocab_size=64, max_length=8).build(), tokens[:, :-1], tokens[:, 1:])
    assert seen
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
