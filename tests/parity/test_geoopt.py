"""geoopt 0.5.1: our geodesic step without its clamp is the exponential map of the sphere at the projected update."""

import pytest
import torch

from normlab.ops import geodesic_step

from .compare import WRONG, check, differences, quiet_imports, states, tolerance

with quiet_imports():
    from geoopt import Sphere

SPHERE = Sphere()
NO_CLAMP = 1e9
FACTORS = (0.01, 0.3, 1.0)
"""Times updates of length up to five: angles from hundredths to most of a turn."""


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def ours(g: torch.Tensor, factor: torch.Tensor):
    return lambda x: geodesic_step(x, g, factor, NO_CLAMP)


def theirs(g: torch.Tensor, factor: torch.Tensor, move=SPHERE.expmap):
    """On the sphere of radius one, where geoopt lives."""
    return lambda x: move(x, SPHERE.proju(x, factor * g))


def theirs_at_any_radius(g: torch.Tensor, factor: torch.Tensor):
    """On the sphere through x: shrink it to radius one, walk, grow it again."""

    def step(x: torch.Tensor) -> torch.Tensor:
        radius = x.norm(dim=-1, keepdim=True)
        return radius * theirs(g / radius, factor)(x / radius)

    return step


def leaves(width: int, factor: float, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """An update and the factor on it."""
    update = (size * states(width, seed=4)).detach().requires_grad_()
    return update, torch.tensor(factor, dtype=torch.float64, requires_grad=True)


def compare(their_step, our_step, x: torch.Tensor, g: torch.Tensor, factor: torch.Tensor) -> dict[str, float]:
    return differences(their_step, our_step, x, {"update": (g, g), "factor": (factor, factor)})


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("width", [2, 3, 17])
def test_step_on_the_unit_sphere(width: int, factor: float):
    g, delta = leaves(width, factor)
    walk, step = theirs(g, delta), ours(g, delta)
    # Both behind x/‖x‖: off the sphere, where geoopt's functions mean nothing, the two differ.
    check(compare(lambda x: walk(unit(x)), lambda x: step(unit(x)), states(width), g, delta), tolerance())


@pytest.mark.parametrize("radius", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("factor", FACTORS)
def test_step_on_other_spheres(factor: float, radius: float):
    g, delta = leaves(17, factor, size=radius)
    x = (radius * unit(states(17)) * torch.linspace(0.5, 2.0, 6)[:, None]).detach().requires_grad_()
    check(compare(theirs_at_any_radius(g, delta), ours(g, delta), x, g, delta), tolerance())


def test_a_retraction_is_told_apart():
    g, delta = leaves(17, 0.3)
    x = unit(states(17)).detach().requires_grad_()
    found = compare(theirs(g, delta, SPHERE.retr), ours(g, delta), x, g, delta)
    assert found["output"] > WRONG
    assert found["gradient of update"] > WRONG
