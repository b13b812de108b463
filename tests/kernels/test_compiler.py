"""What tells the compiler of our operators: marked as torch marks it, and no second spent on importing the compiler."""

from __future__ import annotations

import subprocess
import sys

import torch

from normlab.kernels import compiler


def test_the_mark_is_torchs_own():
    @torch.compiler.assume_constant_result
    def marked() -> bool:
        return True

    assert vars(compiler._announce) == vars(marked) != {}


def test_importing_does_not_import_the_compiler():
    code = "import sys, normlab.schemes, normlab.dynamics.chosen; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
