"""Laws by name, alone and of a user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import normlab
from normlab.dynamics.system import laws
from normlab.errors import NormLabError
from normlab.schemes.catalog.registry import unregister
from normlab.schemes.contract.law import Law, Motion, on_sphere
from normlab.schemes.contract.parts import Add, Step
from tests.dynamics.particles import flow, follow, uniform

WITHOUT_FLOW = {"lambdas", "siamese"}
"""Schemes that state how they grow, but no speed."""

REST = {"rms": on_sphere, "forward": "bounded", "backward": ""}


def test_every_scheme_and_the_stand_alone_laws_have_names():
    assert set(laws.law_names()) == {*normlab.list_schemes(), "sqrt"} - WITHOUT_FLOW
    for name in laws.law_names():
        assert laws.find_law(name, 6).speed is not None
    assert laws.scheme_of("sqrt") is None
    assert laws.scheme_of(" SQRT ") is None
    assert laws.scheme_of("sandwich") == normlab.scheme("peri")
    assert laws.scheme_of("peri(step=0.1)") == normlab.scheme("peri", step=0.1)


def test_sqrt_is_the_papers_law():
    ones = torch.ones(1, 2)
    motion = Motion(time=3 * ones, radius=5 * ones, attention=ones, radial=ones, tangent=0 * ones)
    law = laws.find_law("sqrt", 6)
    assert torch.equal(law.speed(motion), 2 * ones)
    assert torch.equal(law.radial(motion), 0 * ones)


def test_a_users_own_law_is_followed():
    law = Law(speed=lambda m: 2 * torch.ones_like(m.radius), radial=lambda m: m.radius, **REST)
    begin = uniform(5, 3)
    own, post = follow(flow(law), begin, 2.0)[0], follow(flow("post"), begin, 1.0)[0]
    torch.testing.assert_close(own.theta, post.theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(own.radius, torch.full_like(own.radius, math.e**2), rtol=1e-9, atol=0)


def test_a_plugged_in_scheme_is_simulated_by_its_law():
    @dataclass(frozen=True, kw_only=True)
    class Half(normlab.Scheme):
        """Half a step."""

        name = "half-step"

        def sublayer(self, site):
            return Step(Add(0.5 * site.dt), read=self.new_norm(site.dim))

        def law(self, depth):
            return Law(speed=lambda m: 2 * m.radius, radial=lambda m: m.radial / 2, **REST)

    normlab.register(Half)
    try:
        begin = uniform(5, 3)
        half, pre = follow(flow("half-step"), begin, 2.0)[0], follow(flow("pre(step=0.5)"), begin, 2.0)[0]
        torch.testing.assert_close(half.theta, pre.theta)
        assert "half-step" in laws.law_names()
    finally:
        unregister(Half)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("srqt", "unknown scheme or law 'srqt'; did you mean 'sqrt'"),
        ("pery", "did you mean 'peri'"),
        ("peri(stp=1)", "unknown option of peri 'stp'"),
        (Law(speed=None, **REST), "states no speed, so it cannot be simulated; try one of attnres, .*, sqrt"),
        (Law(speed=lambda m: 1.0, **REST), r"speed must return one number for each token, \(2, 3\) here, got float"),
        (Law(speed=lambda m: m.radius.sum(), **REST), r"got \(\)"),
        (Law(speed=lambda m: m.radius, radial=lambda m: m.radius[0], **REST), r"radial must return .* got \(3,\)"),
        (Law(speed=lambda m: m.radius * math.nan, **REST), "speed returns NaN"),
    ],
)
def test_bad_laws_are_told_in_one_line(spec, said):
    with pytest.raises(NormLabError, match=said) as caught:
        laws.find_law(spec, 4)
    assert "\n" not in str(caught.value)
