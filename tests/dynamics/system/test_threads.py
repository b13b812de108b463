"""Threads: small systems take one, whoever follows them; what the user set is there again in the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from normlab.dynamics.system import small_systems
from normlab.dynamics.system.integrators import RungeKutta4
from normlab.dynamics.system.small_systems import limit_threads
from normlab.schemes.contract.law import Law, on_sphere
from tests.dynamics.particles import flow, uniform


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_small_systems_take_one_thread_and_large_ones_all():
    with limit_threads(torch.empty(1, 64, 3)):
        assert torch.get_num_threads() == 1
    with limit_threads(torch.empty(1, 256, 512)):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_the_users_number_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), limit_threads(torch.empty(1, 2, 2)):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("shared", "expected"), [(1, 3), (2**40, 1)])
def test_an_orbit_is_followed_so_and_its_reader_is_not(monkeypatch, shared, expected):
    monkeypatch.setattr(small_systems, "_SHARED", shared)
    seen: list[int] = []

    def speed(motion):
        seen.append(torch.get_num_threads())
        return torch.ones_like(motion.radius)

    law = Law(speed=speed, rms=on_sphere, forward="bounded", backward="")
    system = flow(law)
    seen.clear()
    for _ in RungeKutta4(step=0.5).orbit(system, uniform(4, 3), [1.0, 2.0]):
        assert torch.get_num_threads() == 3
    assert set(seen) == {expected}
