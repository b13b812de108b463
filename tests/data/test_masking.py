"""Masked tokens: as many and as BERT has them, the same for a seed and a window on every machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from normlab import Encoder, EncoderConfig, NormLabError
from normlab.data import IGNORED, Loader, Masking, evaluation_batches
from normlab.data.windows import Window
from tests.data.helpers import END, tokens_of

VOCABULARY = 50_000
MASKING = Masking(VOCABULARY, END, seed=3)


def rows_of(count: int, length: int, start: int = 1000) -> Window:
    """Windows of tokens that are all different, but for an end in every tenth place."""
    tokens = np.arange(start, start + count * length).reshape(count, length) % VOCABULARY
    tokens[:, ::10] = END
    return Window(tokens - 1, tokens, np.zeros_like(tokens))


def loader(**options) -> Loader:
    known = {"length": 8, "batch": 2, "seed": 3, "prefetch": 0, "masking": Masking(5000, END, seed=3)}
    return Loader(tokens_of([30, 7, 55, 12]), **known | options)


def take(feed: Loader, count: int) -> list[torch.Tensor]:
    found = [next(feed) for _ in range(count)]
    return [torch.cat(column) for column in zip(*((batch.inputs, batch.targets) for batch in found), strict=True)]


def test_shares_are_berts():
    rows = rows_of(2000, 500)
    hidden = MASKING.hide(rows, np.arange(2000))
    chosen = hidden.targets != IGNORED
    text = rows.targets != END
    masked, same = hidden.inputs == MASKING.mask, hidden.inputs == rows.targets
    shares = {
        0.15: (chosen[text]), 0.8: masked[chosen], 0.1: same[chosen],
    }  # fmt: skip
    for share, found in shares.items():
        # Five standard deviations of a share of so many independent draws.
        assert abs(found.mean() - share) < 5 * math.sqrt(share * (1 - share) / found.size), share
    replaced = chosen & ~masked & ~same
    assert abs(replaced[chosen].mean() - 0.1) < 5 * math.sqrt(0.09 / chosen.sum())
    others = hidden.inputs[replaced]
    # Any token, evenly: the mean of so many is known to five of its standard deviations.
    assert abs(others.mean() / VOCABULARY - 0.5) < 5 / math.sqrt(12 * others.size)
    assert others.min() >= 0
    assert others.max() < VOCABULARY
    # What was not chosen is there as it was, and what was is the target.
    assert np.array_equal(hidden.inputs[~chosen], rows.targets[~chosen])
    assert np.array_equal(hidden.targets[chosen], rows.targets[chosen])


def test_neighbours_are_hidden_independently():
    chosen = (MASKING.hide(rows_of(2000, 500), np.arange(2000)).targets != IGNORED)[:, 1:10]
    flat = chosen.reshape(len(chosen), -1).astype(float)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    # A correlation of 2000 independent pairs has a standard deviation of 1/√2000; 36 of them are looked at.
    assert np.abs(correlation).max() < 5 / math.sqrt(2000)


def test_ends_and_padding_are_never_hidden():
    rows = rows_of(50, 100)
    rows.targets[:, 60:] = IGNORED
    hidden = Masking(VOCABULARY, END, seed=0, share=1.0).hide(rows, np.arange(50))
    assert (hidden.targets[:, :60][rows.targets[:, :60] == END] == IGNORED).all()
    assert (hidden.targets[:, 60:] == IGNORED).all()
    assert (hidden.inputs[:, 60:] == 0).all()
    assert (hidden.targets[:, :60][rows.targets[:, :60] != END] != IGNORED).all()


def test_it_follows_from_seed_and_number_alone():
    rows = rows_of(4, 200)
    whole = MASKING.hide(rows, np.arange(4))
    for k in range(4):
        one = MASKING.hide(Window(*(array[k : k + 1] for array in rows)), np.array([k]))
        assert np.array_equal(one.inputs[0], whole.inputs[k])
    assert not np.array_equal(MASKING.hide(rows, np.arange(1, 5)).targets, whole.targets)
    other = Masking(VOCABULARY, END, seed=4).hide(rows, np.arange(4))
    assert not np.array_equal(other.targets, whole.targets)


@pytest.mark.parametrize(("world", "batch"), [(2, 2), (1, 4), (4, 1)])
def test_ranks_see_what_one_sees(world, batch):
    steps = 9
    one = take(loader(batch=4), steps)
    ranks = [take(loader(rank=rank, world=world, batch=batch), steps) for rank in range(world)]
    for column, expected in enumerate(one):
        parts = [found[column].view(steps, batch, -1) for found in ranks]
        assert torch.equal(torch.cat(parts, dim=1).flatten(0, 1), expected)


def test_it_resumes_at_the_exact_token():
    straight = take(loader(), 20)
    first = loader()
    before = take(first, 7)
    with loader(prefetch=3) as second:
        second.load_state_dict(first.state_dict())
        after = take(second, 13)
    for expected, *parts in zip(straight, before, after, strict=True):
        assert torch.equal(torch.cat(parts), expected)
    with pytest.raises(NormLabError, match=r"cannot resume on another mask: saved with mask 0\.15, this has 0\.3"):
        loader(masking=Masking(5000, END, seed=3, share=0.3)).load_state_dict(first.state_dict())


def test_another_epoch_hides_others():
    feed = loader(batch=1, masking=Masking(5000, END, seed=3, share=0.5))
    per_epoch = feed._samples.per_epoch
    seen = [{int(t) for t in next(feed).targets.flatten() if t != IGNORED} for _ in range(4 * per_epoch)]
    epochs = [set().union(*seen[k * per_epoch : (k + 1) * per_epoch]) for k in range(4)]
    assert len({frozenset(epoch) for epoch in epochs}) == 4


def test_evaluation_hides_the_same_however_it_is_cut():
    tokens, masking = tokens_of([30, 7, 55, 12]), Masking(5000, END, seed=0, share=0.4)

    def found(**options) -> list[int]:
        world = options.get("world", 1)
        ranks = [
            list(evaluation_batches(tokens, length=8, masking=masking, rank=rank, **options)) for rank in range(world)
        ]
        return sorted(int(t) for batches in ranks for b in batches for t in b.targets.flatten() if t != IGNORED)

    one = found(batch=1)
    assert one == found(batch=3) == found(batch=2, world=2)
    assert len(set(one)) == len(one) < tokens.n_tokens


def test_a_window_that_ends_early_is_evaluated_as_if_it_were_alone():
    """Two whole windows and one of five tokens: what fills it up must not be seen."""
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(depth=2, dim=16, heads=2, vocab_size=5001, max_length=8, init_std=0.5)).double()
    options = {"length": 8, "max_tokens": 21, "masking": Masking(5000, END, seed=0, share=0.9)}
    for batch in (1, 2, 5):
        *whole, last = evaluation_batches(tokens_of([30, 7]), batch=batch, **options)
        assert all(one.documents is None for one in whole)
        row = 2 % batch
        inputs, targets = last.inputs[row : row + 1, :5], last.targets[row : row + 1]
        alone = model.loss(inputs, targets[:, :5])
        assert (targets[:, :5] != IGNORED).sum() > 1
        padded = model.loss(
            last.inputs, torch.where(torch.arange(batch)[:, None] == row, last.targets, IGNORED), **last.options
        )
        torch.testing.assert_close(padded, alone, rtol=1e-12, atol=0.0)
    # A whole last window needs no document numbers, whatever follows it in its batch.
    assert all(
        one.documents is None for one in evaluation_batches(tokens_of([30]), batch=3, **options | {"max_tokens": 16})
    )


def test_documents_go_with_the_tokens_they_belong_to():
    plain, masked = loader(boundaries="respected", masking=None), loader(boundaries="respected")
    one, two = next(plain), next(masked)
    assert torch.equal(one.documents, two.documents)
    scored = two.targets != IGNORED
    assert torch.equal(one.targets[scored], two.targets[scored])


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_a_share_is_a_share(share):
    with pytest.raises(NormLabError, match=r"mask must lie in \(0, 1\], a share of the tokens"):
        Masking(10, 9, seed=0, share=share)
