"""Converted models in `normlab check`: their scheme is named, and holds its certificate as in models of ours."""

from __future__ import annotations

import pytest
import torch

import normlab
from normlab import hf
from normlab.checks.theory.certificates import certify, observe
from normlab.checks.theory.scheme_stack import find_stack
from normlab.probes.blocks import find_stacks
from tests.hf.zoo import VOCABULARY, ZOO
from tests.matrix import parametrize

BOUNDED = ("post", "peri", "geonorm", "deepnorm", "dual")
"""Bounded by their gains, whatever branches return."""


def converted(scheme: str, name: str = "llama"):
    return hf.convert(ZOO[name].build(), scheme, init=True, residual_only=True, roles=ZOO[name].roles)


def pass_of(model):
    tokens = torch.randint(VOCABULARY - 3, (2, 7), generator=torch.Generator().manual_seed(0))
    return lambda: model(tokens)


@parametrize("scheme", normlab.list_schemes(), quick=["geonorm", "hc", "mix", "peri", "post"])
def test_no_token_exceeds_its_bound(scheme):
    model = converted(scheme)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    stack = find_stack(model)
    seen = observe(stack, pass_of(model))
    proven = certify(stack, seen.entry)
    assert stack.scheme.name == scheme
    assert len(proven.curve) == len(seen.largest) == 3
    assert all(size <= bound * (1.0 + seen.slack) for size, bound in zip(seen.largest, proven.curve, strict=True))
    assert (proven.curve[-1] < float("inf")) or scheme not in BOUNDED


@pytest.mark.parametrize("scheme", ["geonorm", "peri(step=0.1)"])
def test_a_check_names_the_scheme_and_judges_its_certificate(scheme):
    found = normlab.check(converted(scheme), steps=2, start_size="none")
    assert found.target.scheme == scheme
    assert {one.name: one.finding for one in found.verdicts}["certificate"] == "kept"
    assert found.theory.growth == ("bounded" if scheme == "geonorm" else "linear")
    assert len(found.theory.before.slopes) == 2


def test_a_state_above_its_bound_is_named():
    model = converted("geonorm")
    model.model.layers[1].normlab.block.register_forward_hook(lambda _block, _args, state: 2.0 * state)
    named = {one.name: one for one in normlab.check(model, steps=1, start_size="none").verdicts}
    assert named["certificate"].finding == "certificate violated"
    assert named["norm drift"].level == "fail"


@pytest.mark.parametrize("scheme", ["hc", "dual", "pre(form='sphere')"])
def test_the_hidden_state_of_several_streams_is_seen(scheme):
    """Streams start as copies: taken for tokens, they look collapsed."""
    found = normlab.check(converted(scheme), steps=1, start_size="none")
    named = {one.name: one for one in found.verdicts}
    assert named["collapse"].level == "ok"
    assert named["structure"].level == "ok"
    model = converted(scheme)
    stack = find_stacks(model)[0]
    shapes = []
    for block in stack.blocks:
        block.register_forward_hook(lambda _b, _a, state: shapes.append(stack.hidden(state).shape))
    pass_of(model)()
    assert shapes == [(2, 7, 32), (2, 7, 32)]


def test_layers_that_scale_the_state_have_no_certificate():
    model = converted("peri", "gemma4")
    assert find_stack(model) is None
    found = normlab.check(model, steps=1, start_size="none")
    assert found.target.scheme == "peri(entry_norm=False)"
    words = {one.name: one.words for one in found.verdicts}["certificate"]
    assert words == "not measured: its layers do more to the state than the scheme"
