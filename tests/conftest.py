"""What every test gets: one thread a process, a fixed seed, memory that is poisoned before use."""

from __future__ import annotations

import os

# `NORMLAB_TEST_DEVICE=cuda` runs the kernels' tests on a GPU (`make test-gpu`). Everywhere else they run in Triton's
# interpreter: the same code, in Python, on the CPU. Triton asks when it is first imported.
DEVICE = os.environ.get("NORMLAB_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
# cuBLAS is deterministic only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import settings

from tests.browser import browser, open_page  # noqa: F401  # fixtures of every page's tests
from tests.matrix import is_repetition

torch.set_num_threads(1)
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
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


@pytest.fixture
def no_default_device():
    """For what is compiled: torch 2.11 cannot trace through a default device."""
    torch.set_default_device(None)
    yield
    torch.set_default_device(DEVICE if DEVICE != "cpu" else None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_repetition(item):
            item.add_marker(pytest.mark.alike)
