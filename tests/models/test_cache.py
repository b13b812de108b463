"""The cache: what goes in comes out, in order; it says when it is full."""

from collections.abc import Iterator

import pytest
import torch

from normlab.errors import NormLabError
from normlab.models.cache import KVCache


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that reading a position nobody wrote cannot pass by luck."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 2, count, 3, 4, generator=torch.Generator().manual_seed(seed))
    return k, v


def make(max_length: int = 8, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(layers=2, batch=2, max_length=max_length, kv_heads=3, head_dim=4, dtype=dtype)


def test_layers_append_at_the_common_length():
    cache, (k, v) = make(), tokens(7)
    for start, end in ((0, 4), (4, 5), (5, 7)):
        for layer, sign in ((0, 1), (1, -1)):
            keys, values = cache[layer].append(sign * k[:, start:end], sign * v[:, start:end])
            assert torch.equal(keys, sign * k[:, :end])
            assert torch.equal(values, sign * v[:, :end])
        assert cache.length == start
        cache.advance(end - start)
    assert cache.length == 7


def test_without_advance_the_same_place_is_written_again():
    cache, (k, v) = make(), tokens(2)
    cache[0].append(k + 1, v + 1)
    assert torch.equal(cache[0].append(k, v)[0], k)


def test_crop_forgets_the_end():
    cache, (k, v) = make(), tokens(5)
    cache[0].append(k, v)
    cache.advance(5)
    cache.crop(2)
    new_k, new_v = tokens(1, seed=1)
    keys, _ = cache[0].append(new_k, new_v)
    assert torch.equal(keys, torch.cat([k[:, :2], new_k], 1))
    for wrong in (-1, 3):
        with pytest.raises(NormLabError, match="expected 0 to 2"):
            cache.crop(wrong)


def test_overflow_is_an_error_that_names_the_size_to_ask_for():
    cache, (k, v) = make(max_length=4), tokens(3)
    cache[0].append(k, v)
    cache.advance(3)
    with pytest.raises(NormLabError, match="try max_length=6"):
        cache[0].append(k, v)
    with pytest.raises(NormLabError, match="try max_length=5"):
        cache.advance(2)
    assert cache.length == 3


def test_bytes_and_dtype():
    cache, (k, v) = make(dtype=torch.bfloat16), tokens(1)
    assert cache.bytes == 2 * 2 * 2 * 8 * 3 * 4 * 2
    assert len(cache) == 2
    assert cache[1].append(k, v)[0].dtype == torch.bfloat16


def test_refuses_shapes_gradients_and_sizes():
    cache, (k, v) = make(), tokens(1)
    with pytest.raises(NormLabError, match=r"expected \(2, tokens, 3, 4\)"):
        cache[0].append(k[:1], v)
    with pytest.raises(NormLabError, match="no_grad"):
        cache[0].append(k, v.requires_grad_())
    with pytest.raises(NormLabError, match="positive"):
        make(max_length=0)
    with pytest.raises(NormLabError, match="try crop"):
        cache.advance(-1)
    with pytest.raises(IndexError):
        cache[2]
