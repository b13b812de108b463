"""What tells the compiler of our operators: marked as torch marks it, and no second spent on importing the compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from normlab.kernels import compiler


def test_the_mark_is_torchs_own():
    @torch.compiler.assume_constant_result
    def marked() -> bool:
        return True

    assert vars(compiler._register_fallbacks) == vars(marked) != {}


def test_importing_does_not_import_the_compiler():
    code = "import sys, normlab.schemes, normlab.dynamics.command; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.full
def test_a_second_process_takes_what_the_first_compiled(tmp_path):
    code = """
import pytest
import torch
from torch._dynamo.utils import counters
from normlab import Decoder, DecoderConfig
from normlab.kernels.compiler import cache_autograd_functions

torch.set_num_threads(1)
cache_autograd_functions()
torch.manual_seed(0)
model = Decoder(DecoderConfig(depth=1, dim=16, heads=2, vocab_size=32, max_length=8, scheme="geonorm"))
tokens = torch.arange(16).view(2, 8)
loss = torch.compile(model.loss)(tokens, tokens)
loss.backward()
norm = sum(float(p.grad.double().square().sum()) for p in model.parameters())
print(counters["aot_autograd"]["autograd_cache_hit"], loss.item(), norm)
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (hits, *first), (again, *second) = (run.stdout.split() for run in runs)
    assert (hits, again) == ("0", "1")
    assert first == second
