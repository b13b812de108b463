"""What every test gets: one thread a process, a fixed seed, memory that is poisoned before use."""

from __future__ import annotations

import os

# Kernels run in Triton's interpreter here: the same code, in Python, on the CPU. Triton asks when it is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# An element that a step forgot to write is NaN, not whatever the allocator left there.
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True, warn_only=False)

# A person's run looks for new counterexamples; CI must judge every change by the same ones.
settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
