"""What every test gets: one thread a process, a fixed seed, memory that is poisoned before use."""

from __future__ import annotations

import atexit
import gc
import os

import pytest

from tests.browser import browser, open_page  # noqa: F401  # fixtures of every page's tests
from tests.matrix import is_left_out, is_repetition

# `NORMLAB_TEST_DEVICE=cuda` runs the kernels' tests on a GPU (`make test-gpu`). Everywhere else they run in Triton's
# interpreter: the same code, in Python, on the CPU. Triton asks when it is first imported.
DEVICE = os.environ.get("NORMLAB_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
# cuBLAS is deterministic only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    """Torch is imported here, after the environment is set, and only by processes that run tests."""
    if not hands_out_tests(config):
        set_up_files()
        set_up_torch()
        set_up_hypothesis()
        gc.disable()  # until everything is collected: what is imported stays


def hands_out_tests(config: pytest.Config) -> bool:
    """Whether other processes run the tests (`-n 2`): they start once this one is configured."""
    return not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no"


def set_up_files() -> None:
    """Nobody pulls the plug of a test: what it writes need not reach the disk. Processes that it starts do wait."""
    os.fsync = lambda _file: None  # tests of full and failing disks put their own in its place


def set_up_torch() -> None:
    import torch

    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)
    # An element that a step forgot to write is NaN, not whatever the allocator left there.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=False)


def set_up_hypothesis() -> None:
    """A person's run looks for new counterexamples; CI must judge every change by the same ones."""
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """Modules and test cases are never garbage: the collector need not look through them again."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # then they are: bindings that count their objects complain of what remains


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    # Off the GPU, `torch.manual_seed` would note a stack trace for each kind of device that is not there.
    (torch.default_generator if DEVICE == "cpu" else torch).manual_seed(0)


@pytest.fixture
def no_default_device():
    """For what is compiled: torch 2.11 cannot trace through a default device."""
    import torch

    torch.set_default_device(None)
    yield
    torch.set_default_device(DEVICE if DEVICE != "cpu" else None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_repetition(item):
            item.add_marker(pytest.mark.alike)
        if is_left_out(item):
            item.add_marker(pytest.mark.full)
