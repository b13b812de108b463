"""What every scheme must do, ours and others': a scheme is tested by being registered."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import normlab
from normlab import NormLabError
from normlab.card import SECTIONS, Card
from normlab.norms import rms
from normlab.schemes.law import Motion

from .conftest import DIM, SCHEMES, make_input, make_stack, weighted_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(stack, x) -> dict[str, torch.Tensor]:
    stack.zero_grad()
    weighted_sum(stack(x)).backward()
    return {name: p.grad for name, p in stack.named_parameters()}


# -- gradients -----------------------------------------------------------------------------------------------------


def test_every_parameter_gets_a_finite_nonzero_gradient(scheme):
    stack, x = make_stack(scheme), make_input()
    for name, grad in gradients(stack, x).items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 0, name
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_zero_outputs_learn_or_are_refused(scheme):
    if not scheme.zero_outputs:
        with pytest.raises(NormLabError, match="must not start at zero"):
            make_stack(scheme, init=False).init_(zero_outputs=True)
        return
    stack = make_stack(scheme, init=False).init_(zero_outputs=True)
    found = gradients(stack, make_input())
    assert all(grad.isfinite().all() for grad in found.values())
    # Behind a zero matrix nothing moves in the first step; the zero matrices themselves must. SpanNorm's attention
    # reaches the output only through the MLP, which is zero here: it starts one step later.
    spans = type(stack.layers[0].block).__name__ == "SpanBlock"
    for role in stack.find_roles():
        if role.role == "down" or (role.role == "o" and not spans):
            assert found[role.name].abs().max() > 0, role.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["zero update", "parallel", "zero state", "huge", "tiny", "ordinary"])
def test_finite_values_and_gradients_at_the_edges(scheme, case, dtype):
    bound = scheme.bind(depth=4, dim=DIM)
    scale = {"huge": 1e4, "tiny": 1e-4, "zero state": 0.0}.get(case, 1.0)
    x = make_input(dtype=dtype, scale=scale)
    # Updates of ordinary size: eight of 1e4 would leave fp16's range in any scheme that just adds.
    g = {"zero update": torch.zeros_like(x), "parallel": 0.5 * x}.get(case, torch.randn_like(x) * min(scale or 1, 1))
    g = g.detach().requires_grad_()
    state = bound.entry()(x)
    for k in range(4):
        state = bound.block(k)(state, [lambda _: g, lambda _: g])
        assert state.dtype == dtype
        assert bound.hidden(state).shape == x.shape
    y = bound.exit()(state)
    assert y.dtype == dtype
    assert y.isfinite().all()
    (y.float() / y.numel()).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert g.grad is not None
    assert g.grad.isfinite().all()


def test_stream_keeps_its_type_under_autocast(scheme):
    stack = make_stack(scheme)
    with torch.autocast("cpu", torch.bfloat16):
        for x in (make_input(), make_input(dtype=torch.bfloat16)):
            y = stack(x)
            assert y.dtype == x.dtype
            assert y.isfinite().all()


# -- building, copying, saving ---------------------------------------------------------------------------------------


def test_meta_build_then_materialise_equals_direct_build(scheme):
    direct = make_stack(scheme)
    with torch.device("meta"):
        late = make_stack(scheme, init=False)
    late.to_empty(device="cpu").init_(generator=torch.Generator().manual_seed(0))
    assert late.state_dict().keys() == direct.state_dict().keys()
    for name, value in direct.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    assert torch.equal(direct(make_input()), late(make_input()))


def test_copies_and_saved_states_are_the_same_network(scheme):
    stack, x = make_stack(scheme), make_input()
    other = make_stack(scheme, seed=7)
    assert not torch.equal(stack(x), other(x))
    other.load_state_dict(load(save(stack.state_dict())))
    for twin in (other, copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert torch.equal(stack(x), twin(x))


def test_schemes_are_frozen_and_read_back_from_their_text(scheme):
    with pytest.raises(AttributeError):
        scheme.eps = 1.0
    if scheme.name in normlab.schemes():
        assert normlab.scheme(str(scheme)) == scheme
    assert scheme == copy.deepcopy(scheme)
    assert hash(scheme) == hash(copy.deepcopy(scheme))


def test_parts_of_a_pipeline_are_the_whole(scheme):
    whole = make_stack(scheme)
    parts = [make_stack(scheme, 2, init=False, first=first, depth=4) for first in (0, 2)]
    for part in parts:
        part.load_state_dict(_share(whole.state_dict(), part))
    x = make_input()
    assert torch.equal(parts[1](parts[0](x)), whole(x))


def _share(state, part) -> dict[str, torch.Tensor]:
    """The part's own entries, its layers counted from the beginning of the whole."""
    first = part.bound.first
    place = {
        name: re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name) for name in part.state_dict()
    }
    return {name: state[source] for name, source in place.items()}


def test_checkpointing_changes_nothing(scheme):
    plain, saving = make_stack(scheme), make_stack(scheme, checkpointing=True)
    one, two = make_input(), make_input()
    for (name, a), b in zip(gradients(plain, one).items(), gradients(saving, two).values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(one.grad, two.grad)


def test_parallel_blocks_work_or_are_refused(scheme):
    if "parallel" not in scheme.topologies:
        with pytest.raises(NormLabError, match="no parallel form"):
            make_stack(scheme, topology="parallel")
        return
    stack = make_stack(scheme, topology="parallel")
    for name, grad in gradients(stack, make_input()).items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
    wide = [make_stack(scheme, topology=topology, std=0.3) for topology in ("serial", "parallel")]
    assert not torch.allclose(wide[0](make_input()), wide[1](make_input()), atol=1e-3)


@pytest.mark.parametrize("depth", [1, 96])
def test_shallow_and_deep(scheme, depth):
    y = make_stack(scheme, depth)(make_input())
    assert y.isfinite().all()
    assert y.std() > 0


# -- schemes and options differ ----------------------------------------------------------------------------------------


def test_any_two_schemes_differ():
    outputs = {}
    for scheme in SCHEMES:
        stack = make_stack(scheme)
        matrices = [role.view() for role in stack.find_roles() if role.is_matrix]
        generator = torch.Generator().manual_seed(3)
        for matrix in matrices:
            matrix.copy_(torch.randn(matrix.shape, generator=generator) / math.sqrt(DIM))
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
    "decoder_depth": 8,
    "eps": 1e-2,
    "final_eps": 1e-2,
    "form": "sphere",
    "gain": "offset",
    "gamma": 0.5,
    "max_angle": 0.1,
    "norm": "layer",
    "order": "decay-first",
    "output_gain": 0.5,
    "post_fraction": 0.5,
    "post_weight": 0.5,
    "qk_norm": "head",
    "scale": 0.5,
    "scale_init": "sublayers",
    "step": 0.5,
    "tau": 0.3,
}


def another_value(scheme, option):
    default = getattr(scheme, option)
    if option == "init":
        return {"base": "xavier", "xavier": "base"}[default]
    return not default if isinstance(default, bool) else OTHER[option]


def fingerprint(scheme) -> list[torch.Tensor]:
    """All that an option can change: initial weights, every state, the output."""
    stack = make_stack(scheme).double()
    weights = [p.detach().clone() for p in stack.parameters()]
    # Gains and scalars away from their start, or an option that acts through them would not show.
    for role in stack.find_roles():
        if not role.is_matrix:
            role.parameter.data += 0.8
    states: list[torch.Tensor] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda _module, _args, state: states.append(state.detach()))
    x = make_input(dtype=torch.float64, scale=0.1)
    return [*weights, stack(x).detach(), *states]


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
            same = equal(before, fingerprint(type(scheme)(**change)))
            assert same == ((scheme.name, option) in INERT), option


def equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    if [a.shape for a in before] != [b.shape for b in after]:
        return False
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- optimiser -------------------------------------------------------------------------------------------------------


def test_every_parameter_stands_in_exactly_one_group(scheme):
    stack = make_stack(scheme)
    groups = stack.param_groups(lr=1e-3, weight_decay=0.1)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in stack.parameters())
    small = {id(role.parameter) for role in stack.find_roles() if not role.is_matrix}
    for group in groups:
        assert group["weight_decay"] == 0.0 or not small & {id(p) for p in group["params"]}
    torch.optim.AdamW(groups)


def test_no_parameter_is_a_scalar(scheme):
    # FSDP2 refuses parameters without a dimension.
    assert all(p.ndim > 0 for p in make_stack(scheme).parameters())
    switches = [option for option in ("scalar", "learned") if option in scheme.options()]
    changes = [{option: True} for option in switches]
    changes += [] if (scheme.name, "norm") in REFUSED else [{"norm": "derf"}]
    for change in changes:
        assert all(p.ndim > 0 for p in make_stack(type(scheme)(**change)).parameters())


def test_after_step_is_idempotent_and_keeps_types(scheme):
    stack = make_stack(scheme).to(torch.bfloat16)
    for p in stack.parameters():
        p.data += 0.1
    stack.after_step()
    once = {k: v.clone() for k, v in stack.state_dict().items()}
    stack.after_step()
    for name, value in stack.state_dict().items():
        assert value.dtype == torch.bfloat16
        # Renormalising a rounded unit vector may move its last bit.
        assert torch.allclose(value, once[name], rtol=2**-7, atol=0), name


# -- theory ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(depth=st.integers(1, 8), seed=st.integers(0, 1000), size=st.floats(0.01, 30.0))
def test_no_certificate_is_violated(depth, seed, size):
    for scheme in SCHEMES:
        stack = make_stack(scheme, depth, seed=seed, std=0.5).double()
        generator = torch.Generator().manual_seed(seed)
        for role in stack.find_roles():
            if not role.is_matrix:
                role.parameter.data.mul_(torch.rand(role.parameter.shape, generator=generator) * 3 - 1)
        states: list[torch.Tensor] = []
        stack.entry.register_forward_hook(lambda _module, _args, out, into=states: into.append(out))
        for layer in stack.layers:
            layer.register_forward_hook(lambda _module, _args, out, into=states: into.append(out))
        x = make_input(dtype=torch.float64).detach() * size
        with torch.no_grad():
            stack(x)
        for state, bound in zip(states, stack.certificate(entry=float(rms(x).max())), strict=True):
            # Where nothing is proven nothing can be violated: `none` overflows float64 here.
            if bound < math.inf:
                assert float(rms(stack.hidden(state)).max()) <= bound * (1 + 1e-12), scheme.name


def test_laws_answer_for_tensors_and_depths(scheme):
    law = scheme.law(12)
    assert law.rms(0) == pytest.approx(1.0)
    assert all(math.isfinite(law.rms(i)) for i in range(24))
    if law.speed is None:
        return
    t = torch.linspace(0, 11, 5)
    motion = Motion(time=t, radius=1 + t, attention=0.5 + 0 * t, radial=0.3 + 0 * t, tangent=0.4 + 0 * t)
    assert (law.speed(motion) > 0).all()
    assert law.radial(motion).shape == t.shape
    assert law.temperature(t).shape == t.shape


def test_refined_steps_are_smaller_and_cover_the_same_time(scheme):
    assert scheme.refine(1) == scheme
    assert scheme.refine(2).refine(3) == scheme.refine(6)
    fine = scheme.refine(4).bind(depth=16, dim=DIM)
    assert fine.horizon == scheme.bind(depth=4, dim=DIM).horizon
    assert fine.sublayers == scheme.bind(depth=4, dim=DIM).sublayers


# -- cards -----------------------------------------------------------------------------------------------------------


def test_cards_are_complete_and_count_right(scheme):
    card = Card.of(scheme)
    assert tuple(card.sections) == SECTIONS
    assert card.title
    assert card.summary
    assert all(option.help for option in card.options)
    assert card.extra_params.at(10, 24) == _params_around_the_sublayers(scheme, 10, 24)


def _params_around_the_sublayers(scheme, depth, dim) -> int:
    bound = scheme.bind(depth=depth, dim=dim)
    modules = [bound.entry(), bound.exit(), *(bound.block(k) for k in range(depth))]
    return sum(p.numel() for module in modules for p in module.parameters())


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
        ("none", "none"),
    ],
)
def test_extra_parameters_are_those_of_the_literature(name, formula):
    assert str(Card.of(normlab.scheme(name)).extra_params) == formula
