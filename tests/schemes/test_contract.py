"""What every scheme must do, ours and others': a scheme is tested by being registered.

The rules that hold for anyone's scheme are `normlab.testing`; here they run over every scheme there is, beside what we
ask of our own alone.
"""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import normlab
from normlab import NormLabError
from normlab.roles import drawing_order
from normlab.schemes.catalog.card import SECTIONS, Card
from normlab.testing import RULES
from normlab.testing.small import DIM, make_input, make_stack
from normlab.testing.theory import check_bounds
from normlab.testing.training import differs, fingerprint
from tests.matrix import parametrize

from .conftest import SCHEMES


# test_compile.py compiles more blocks than the rule does; the rule on depth builds hundreds of them.
@parametrize(
    "rule",
    [rule for rule in RULES if rule != "compile"],
    quick=[rule for rule in RULES if rule not in ("compile", "depth")],
)
def test_every_scheme_keeps_the_contract(scheme, rule):
    RULES[rule](scheme)


@pytest.mark.full
@settings(deadline=None, max_examples=15)
@given(depth=st.integers(1, 8), seed=st.integers(0, 1000), size=st.floats(0.01, 30.0))
def test_no_certificate_is_violated(depth, seed, size):
    for scheme in SCHEMES:
        check_bounds(scheme, depth, seed, size)


def test_stacks_are_saved_and_pickled(scheme):
    stack, other, x = make_stack(scheme), make_stack(scheme, seed=7), make_input()
    other.load_state_dict(load(save(stack.state_dict())))
    for twin in (other, pickle.loads(pickle.dumps(stack))):
        assert torch.equal(stack(x), twin(x))


# -- schemes and options differ ----------------------------------------------------------------------------------------


def test_any_two_schemes_differ():
    outputs = {}
    for scheme in SCHEMES:
        stack = make_stack(scheme)
        roles = drawing_order(stack.find_roles())
        generator = torch.Generator().manual_seed(3)
        for role in roles:
            if role.is_matrix:
                role.view().copy_(torch.randn(role.view().shape, generator=generator) / math.sqrt(DIM))
            else:
                role.view().add_(0.3)  # some schemes start as another one
        outputs[scheme.name] = stack(make_input()).detach()
    for (a, first), (b, second) in itertools.combinations(outputs.items(), 2):
        assert (first - second).abs().max() > 1e-3, (a, b)


# A value that differs from the default, for every option that is not a switch.
OTHER = {
    "alpha": 0.5,
    "alpha_scaling": 0.3,
    "beta": 0.5,
    "cut": 3,
    "decay": "sqrt",
    "decay_r": 0.05,
    "decoder_depth": 8,
    "diagonal": 4.0,
    "eps": 1e-2,
    "final_eps": 1e-2,
    "first_0": 0.0,
    "first_r": 1.0,
    "gain": "offset",
    "gamma": 0.5,
    "gate": "dynamic",
    "gate_bias": 0.0,
    "groups": 2,
    "keep": "variance",
    "last_0": 0.0,
    "last_r": 1.0,
    "lr_0": 5.0,
    "lr_r": 5.0,
    "magnitude": 1.0,
    "max_angle": 0.1,
    "merge": "mean",
    "mix_eps": 1e-3,
    "mixing": "none",
    "norm": "layer",
    "order": "decay-first",
    "output_gain": 0.5,
    "post_fraction": 0.5,
    "post_weight": 0.5,
    "qk_norm": "head",
    "rank": 3,
    "rounds": 3,
    "scale": 0.5,
    "scale_init": "sublayers",
    "step": 0.5,
    "streams": 2,
    "tau": 0.3,
    "temperature": 0.5,
}


def another_value(scheme, option):
    default = getattr(scheme, option)
    if option in ("init", "form"):
        return {"base": "xavier", "xavier": "base", "plain": "sphere", "post": "hybrid"}[default]
    return not default if isinstance(default, bool) else OTHER[option]


REFUSED = {
    ("lns", "depth_init"),
    ("hybrid", "qk_norm"),
    ("ngpt", "qk_norm"),
    ("ngpt", "norm"),
    ("ngpt", "gain"),
    ("ngpt", "bias"),
}
# The control has no norm that an option could shape.
INERT = {("none", "norm"), ("none", "eps"), ("none", "gain"), ("none", "bias")}


def test_every_option_does_something_or_is_refused(scheme):
    before = fingerprint(scheme)
    for option in scheme.options():
        change = {option: another_value(scheme, option)}
        if (scheme.name, option) in REFUSED:
            with pytest.raises(NormLabError, match=scheme.name):
                type(scheme)(**change)
        else:
            changed = differs(before, fingerprint(type(scheme)(**change)))
            assert changed == ((scheme.name, option) not in INERT), option


# -- what our own schemes say of themselves --------------------------------------------------------------------------


def test_laws_say_how_the_state_grows(scheme):
    assert scheme.law(12).rms is not None


def test_cards_are_complete(scheme):
    card = Card.of(scheme)
    assert tuple(card.sections) == SECTIONS
    assert card.title
    assert card.summary
    assert all(option.help for option in card.options)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("pre", "(2L + 1)·d"),
        ("post", "2L·d"),
        ("output", "(2L + 1)·d"),
        ("peri(entry_norm=False)", "(4L + 1)·d"),
        ("peri", "(4L + 2)·d"),
        ("mix", "(2L + 1)·d"),
        ("lns", "(2L + 1)·d"),
        ("deepnorm", "2L·d"),
        ("dual", "(2L + 1)·d"),
        ("hybrid", "(L + 1)·d"),
        ("ngpt", "2L·d"),
        ("keel", "(4L − 2)·d"),
        ("layerscale", "(4L + 1)·d"),
        ("geonorm", "d + 4L"),
        ("spannorm", "(2L + 1)·d"),
        ("highway", "(6L + 2)·d"),
        ("highway(gate='dynamic')", "2L·d² + (6L + 2)·d"),
        # n·d(2r + n + 1) a sublayer, n·d(2r + 1) at the exit
        ("gated(streams=2, rank=3)", "(36L + 14)·d"),
        ("lambdas(gain='none')", "2L"),
        ("attnres", "(4L + 1)·d"),
        ("none", "none"),
    ],
)
def test_extra_parameters_are_those_of_the_literature(name, formula):
    assert str(Card.of(normlab.scheme(name)).extra_params) == formula
