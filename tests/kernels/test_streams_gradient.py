"""Gradients of the fused step of n streams where rows are taken in several chunks, and the grid that takes them."""

from __future__ import annotations

import pytest
import torch

from normlab.kernels.fused import launch
from tests.kernels.test_streams import BF16, F16, F32, MODES, NAMES, check, make
from tests.matrix import parametrize

# Chunks of 128 or 256 columns at these widths: whole ones, and a last one with few columns.
WIDTHS = (384, 513)


@parametrize("mode", MODES, quick=["step", "write, no mixing"])
@parametrize("dim", WIDTHS, quick=[513])
@parametrize("shared", [True, False], quick=[False])
def test_rows_in_several_chunks(mode, dim, shared):
    check(make(mode, n=2, dim=dim, rows=(5,), shared=shared), kind="layer")


@parametrize("dtype", [F32, BF16, F16], quick=[BF16], ids=str)
@parametrize("mode", ["step", "write", "read"], quick=["step", "write"])
def test_chunks_in_half_precision(mode, dtype):
    check(make(mode, n=3, dim=513, rows=(4,), dtype=dtype, shared=mode == "step"))


@pytest.mark.parametrize("use", ["state", "input"])
def test_an_output_that_is_not_used_in_chunks(use):
    check(make(dim=300, n=2, rows=(3,), shared=True), use)


@parametrize("own", NAMES[2:5], quick=["comb"])
def test_coefficients_of_which_only_some_are_shared(own):
    made, common = make(n=3, dim=40), make(n=3, dim=40, shared=True)
    check(common._replace(**{own: getattr(made, own)}))
    check(made._replace(**{own: getattr(common, own)}))


@pytest.mark.full
def test_no_token_is_lost_however_many_programs_there_are(monkeypatch):
    made = make(n=2, dim=300, rows=(13,), shared=True)
    for most in (1, 2, 5):
        monkeypatch.setattr(launch, "_programs", lambda tiles, *_, most=most: min(tiles, most))
        check(made)


READS = [torch.empty(1, dtype=BF16)] * 9


def grid(dim: int, monkeypatch, *, shared=228 * 1024, **named) -> launch.Sweep:
    monkeypatch.setattr(launch, "_shared_memory", lambda device: shared)
    return launch.chunks(dim, 10**6, READS, **{"per_thread": 32, "vector": 8, "registers": 128} | named)


@pytest.mark.parametrize("dim", [1, 64, 100, 768, 1280, 2048, 4096, 8192])
def test_chunks_cover_a_row_and_fit_the_multiprocessor(dim, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "_programs", lambda tiles, together, reads: seen.append(together) or together)
    walk = grid(dim, monkeypatch)
    padded = -(-dim // walk.tile.block) * walk.tile.block
    assert dim <= padded <= max(2 * dim - 1, 1)
    assert walk.tile.rows * walk.tile.block == 32 * walk.tile.warps * 8
    # All programs that should run together have their registers and, for all tiles that are prefetched, their memory.
    assert seen[0] * 32 * walk.tile.warps * walk.registers <= 65536
    assert seen[0] * ((walk.stages - 1) * walk.tile.rows * padded * 2 * len(READS) + 1024) <= 228 * 1024


def test_a_row_of_768_columns_is_not_padded(monkeypatch):
    assert grid(768, monkeypatch).tile == launch.Tile(1, 256, 1)


def test_a_single_program_that_could_only_wait_does_not_prefetch(monkeypatch):
    assert grid(8192, monkeypatch).stages == 1
    assert grid(4096, monkeypatch, shared=100 * 1024).stages == 1
    assert grid(4096, monkeypatch).stages > 1
