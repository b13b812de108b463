"""Rules on building, initialising, copying, splitting and saving networks."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import torch

from normlab.schemes.catalog.registry import list_schemes
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack
from normlab.testing.rules import require, require_finite, require_refusal, require_same, rule
from normlab.testing.small import gradients, make_input, make_stack


@rule("initialisation")
def check_initialisation(scheme: Scheme) -> None:
    """`init_` writes every parameter, with the same values for the same seed, whatever the values before."""
    stack = make_stack(scheme, init=False)
    fresh = _vectors(stack)
    stack.init_(generator=torch.Generator().manual_seed(0))
    require_same(fresh, _vectors(stack), "has no value before init_; call reset_parameters() in __init__, too")
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    for parameter in stack.parameters():
        parameter.data.add_(1.0)
    require_same(before, stack.init_(generator=torch.Generator().manual_seed(0)).state_dict(), "does not start again")


def _vectors(stack: Stack) -> dict[str, torch.Tensor]:
    return {role.name: role.parameter.detach().clone() for role in stack.find_roles() if not role.is_matrix}


@rule("meta-device")
def check_meta_device(scheme: Scheme) -> None:
    """A stack built on the meta device and initialised later equals one built directly."""
    direct = make_stack(scheme)
    with torch.device("meta"):
        late = make_stack(scheme, init=False)
    late.to_empty(device="cpu").init_(generator=torch.Generator().manual_seed(0))
    require_same(direct.state_dict(), late.state_dict(), "differs from that of a direct build")
    require(torch.equal(direct(make_input()), late(make_input())), "the output differs from that of a direct build")


@rule("copies")
def check_copies(scheme: Scheme) -> None:
    """A copy, and a stack that loads the state dict, compute the same function."""
    stack, other, x = make_stack(scheme), make_stack(scheme, seed=7), make_input()
    require(not torch.equal(stack(x), other(x)), "another seed gives the same output")
    other.load_state_dict(stack.state_dict())
    require(torch.equal(stack(x), other(x)), "the state dict does not hold all of the network")
    require(torch.equal(stack(x), copy.deepcopy(stack)(x)), "a copy computes another function")


@rule("text")
def check_text(scheme: Scheme) -> None:
    """Schemes are frozen, hashable, and read back from their text where `normlab.scheme` finds them."""
    try:
        scheme.eps = 1.0  # type: ignore[misc]
    except AttributeError:
        pass
    else:
        raise AssertionError("options can be changed; decorate the class with @dataclass(frozen=True, kw_only=True)")
    twin = copy.deepcopy(scheme)
    require(scheme == twin and hash(scheme) == hash(twin), "a copy is not equal")
    if scheme.name in list_schemes() or scheme.origin() is not None:
        require(find_scheme(str(scheme)) == scheme, f"{scheme} is not read back")


@rule("pipeline")
def check_pipeline(scheme: Scheme) -> None:
    """Two parts of a stack, run one after the other, equal the whole stack (pipeline stages)."""
    whole, x = make_stack(scheme), make_input()
    first, second = (make_stack(scheme, 2, init=False, first=place, depth=4) for place in (0, 2))
    for part in (first, second):
        part.load_state_dict(_share(whole.state_dict(), part))
    require(torch.equal(second(first(x)), whole(x)), "blocks depend on more than site.block and site.depth")


def _share(state: Mapping[str, torch.Tensor], part: Stack) -> dict[str, torch.Tensor]:
    """The part's entries of the whole state dict, with its layers renumbered."""
    first = part.bound.first
    place = {
        name: re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name) for name in part.state_dict()
    }
    return {name: state[source] for name, source in place.items()}


@rule("checkpointing")
def check_checkpointing(scheme: Scheme) -> None:
    """Activation checkpointing does not change gradients."""
    one, two = make_input(), make_input()
    plain, saving = gradients(make_stack(scheme), one), gradients(make_stack(scheme, checkpointing=True), two)
    require_same({**plain, "the input": one.grad}, {**saving, "the input": two.grad}, "has another gradient")  # type: ignore


@rule("parallel")
def check_parallel(scheme: Scheme) -> None:
    """Parallel blocks work and differ from serial ones, or `topologies` leaves them out."""
    if "parallel" not in scheme.topologies:
        return require_refusal(lambda: make_stack(scheme, topology="parallel"), "topology='parallel'")
    require_finite(gradients(make_stack(scheme, topology="parallel"), make_input()))
    serial, parallel = (make_stack(scheme, topology=topology, std=0.3) for topology in ("serial", "parallel"))
    differ = not torch.allclose(serial(make_input()), parallel(make_input()), atol=1e-3)
    return require(differ, "a parallel block computes what a serial one does")


@rule("depth")
def check_depth(scheme: Scheme) -> None:
    """Stacks of 1 and 96 blocks give finite outputs that are not constant."""
    for depth in (1, 96):
        y = make_stack(scheme, depth)(make_input())
        require(y.isfinite().all() and y.std() > 0, f"the output of {depth} blocks is constant or not finite")
