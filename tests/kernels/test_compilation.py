"""Kernels that no GPU has run yet are compiled for one: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")


PAIR = {"_forward", "_backward", "_sum"}
KERNELS = {
    "one": PAIR,
    "two": PAIR,
    "many": PAIR,
    "coefficients": PAIR,
    "dynamic": {"_in_parts", "_forward", "_sums", "_columns", "_gather", "_weight", "_sum"},
}


@pytest.mark.full
@pytest.mark.parametrize(("step", "width"), [*((step, 768) for step in KERNELS), ("one", 256), ("dynamic", 2048)])
def test_kernels_compile_for_a_gpu(step, width, tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_without_gpu", step, str(width)]
    env = {**kept, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [line.split() for line in found.stdout.splitlines()]
    assert {line[0] for line in lines} == KERNELS[step]
    if step == "one":
        # The tensors that training reads leave room to prefetch; more of them would not.
        assert all(int(shared) > 4096 for name, _, shared, *_ in lines if name == "_backward"), found.stdout
    if step == "dynamic":
        # Tiles are chosen so that nothing spills.
        assert {line[-1] for line in lines} == {"0"}, found.stdout
