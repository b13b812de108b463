"""Rules on a scheme's theory: bounds, laws, refinement and the numbers on its card."""

from __future__ import annotations

import math

import torch

from normlab.errors import NormLabError
from normlab.norms import rms
from normlab.roles import drawing_order
from normlab.schemes.catalog import terminal
from normlab.schemes.catalog.card import Card
from normlab.schemes.contract.law import Motion
from normlab.schemes.contract.scheme import Scheme
from normlab.testing.rules import require, rule
from normlab.testing.small import DIM, leave_neutral_values, make_input, make_stack


@rule("certificate")
def check_certificate(scheme: Scheme) -> None:
    """The state of random networks never exceeds the bound computed from their parts."""
    for depth, seed, size in ((1, 0, 0.01), (3, 1, 1.0), (8, 2, 30.0)):
        check_bounds(scheme, depth, seed, size)


@torch.no_grad()
def check_bounds(scheme: Scheme, depth: int, seed: int, size: float) -> None:
    """Check the bounds of one network with random gains."""
    stack = make_stack(scheme, depth, seed=seed, std=0.5).double()
    generator = torch.Generator().manual_seed(seed)
    for role in stack.find_roles():
        if not role.is_matrix:
            role.parameter.mul_(torch.rand(role.parameter.shape, generator=generator) * 3 - 1)
    x, states = make_input(dtype=torch.float64).detach() * size, []
    stack(x, states=states)
    for place, (state, bound) in enumerate(zip(states, stack.certificate(entry=float(rms(x).max())), strict=True)):
        # Without a finite bound nothing can be violated: a scheme without norms overflows float64 here.
        if bound < math.inf:
            found = float(rms(stack.hidden(state)).max())
            require(found <= bound * (1 + 1e-12), f"RMS {found:.4g} after {place} blocks, above the bound {bound:.4g}")


@rule("law")
def check_law(scheme: Scheme) -> None:
    """The law, if there is one, can be evaluated for tensors and depths."""
    try:
        law = scheme.law(12)
    except NormLabError:
        return
    if law.rms is not None:
        require(abs(law.rms(0) - 1.0) < 1e-6, f"rms(0) must be 1, got {law.rms(0)}")
        require(all(math.isfinite(law.rms(i)) for i in range(24)), "rms is not finite")
    if law.speed is None:
        return
    t = torch.linspace(0, 11, 5)
    motion = Motion(time=t, radius=1 + t, attention=0.5 + 0 * t, radial=0.3 + 0 * t, tangent=0.4 + 0 * t)
    require((law.speed(motion) > 0).all(), "a speed is not positive")
    require(law.radial(motion).shape == t.shape, "radial does not return one number for each token")
    require(law.temperature(t).shape == t.shape, "temperature does not return one number for each time")


@rule("refinement")
def check_refinement(scheme: Scheme) -> None:
    """Refined steps are shorter and cover the same time, and a refined scheme is a valid scheme."""
    require(scheme.refine(1) == scheme and scheme.refine(2).refine(3) == scheme.refine(6), "refine does not compose")
    coarse, fine = scheme.bind(depth=4, dim=DIM), scheme.refine(4).bind(depth=16, dim=DIM)
    require((fine.horizon, fine.sublayers) == (coarse.horizon, coarse.sublayers), "refined steps cover another time")
    y = make_stack(scheme.refine(2))(make_input())
    require(y.isfinite().all(), "the refined scheme's output is not finite")
    whole, short = _with_equal_matrices(scheme), _with_equal_matrices(scheme.refine(4))
    require(not torch.equal(whole, short), "refined steps are whole ones; multiply what a step adds by site.dt")


@torch.no_grad()
def _with_equal_matrices(scheme: Scheme) -> torch.Tensor:
    """The output of a stack whose matrices do not depend on the scheme's initialisation."""
    stack, draw = make_stack(scheme), torch.Generator().manual_seed(5)
    leave_neutral_values(stack)
    for role in drawing_order(stack.find_roles()):
        if role.is_matrix:
            role.view().normal_(0.0, 0.3, generator=draw)
    return stack(make_input())


@rule("card")
def check_card(scheme: Scheme) -> None:
    """`normlab schemes` can print the scheme, and its parameter count is correct."""
    card = Card.of(scheme)
    terminal.rows(card)
    terminal.facts(card)
    bound = scheme.bind(depth=10, dim=24)
    modules = [bound.entry(), bound.exit(), *(bound.block(k) for k in range(10))]
    counted = sum(p.numel() for module in modules for p in module.parameters())
    stated = card.extra_params.at(10, 24)
    require(stated == counted, f"{counted} parameters at depth 10 and width 24, but the card's formula gives {stated}")
