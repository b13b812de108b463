"""A parameter that nobody initialises is refused by name, never trained from what the memory held before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import normlab
from normlab import NormLabError
from normlab.models import MLP, Attention
from normlab.roles import find_roles
from normlab.schemes import Scheme, Step, Write
from normlab.stack import initialise_
from tests.ranks import free_port, join, leave, spawn

SIZE = {"depth": 2, "dim": 16, "heads": 2, "vocab_size": 32, "max_length": 16}
GATE = math.log(0.2 / 0.8)


class Careless(Write):
    """A gate whose value is written where it is made: lost on the meta device."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.full((1,), GATE))

    def forward(self, state, update):
        share = torch.sigmoid(self.gate)
        return ((1 - share) * state + share * update).to(state.dtype)


class Careful(Careless):
    def reset_parameters(self):
        nn.init.constant_(self.gate, GATE)


class Forgetful(Careful):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))


class Buffered(Careful):
    def __init__(self):
        super().__init__()
        self.register_buffer("portion", torch.full((), 0.5))


class Mixed(Careful):
    """Modules with a matrix are initialised by role, so that their `reset_parameters` is not called."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(16, 16))


@dataclass(frozen=True, kw_only=True)
class Gated(Scheme):
    """Gated: no words."""

    name = "gated"
    write: type = Careless

    def sublayer(self, site):
        return Step(self.write(), read=self.new_norm(site.dim))


@pytest.fixture(autouse=True)
def _memory_as_users_have_it():
    """The test suite fills memory with NaN anyway; here that is the library's to do."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def config(write: type) -> normlab.DecoderConfig:
    return normlab.DecoderConfig(scheme=Gated(write=write), **SIZE)


def stack_of(write: type) -> normlab.Stack:
    return normlab.Stack(Gated(write=write), [(Attention(16, 2), MLP(16, 24)) for _ in range(2)], 16)


CASES = [
    (
        Careless,
        r"gated: stack\.layers\.0\.block\.steps\.0\.write\.gate is not initialised: .*meta device; give Careless",
    ),
    (Forgetful, r"write\.offset is not initialised: Forgetful\.reset_parameters\(\) does not write it"),
    (Buffered, r"write\.portion is not initialised: Buffered\.reset_parameters\(\) does not write it"),
    (Mixed, r"write\.gate is not initialised: Mixed holds a matrix, too.*module of its own"),
]


@pytest.mark.parametrize(("write", "message"), CASES)
def test_a_model_refuses_what_nobody_wrote(write, message):
    with pytest.raises(NormLabError, match=message) as caught:
        normlab.Decoder(config(write))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("write", "message"), CASES)
def test_a_stack_refuses_the_same(write, message):
    with pytest.raises(NormLabError, match=message.replace(r"stack\.", "")):
        stack_of(write).init_()


def test_a_stack_from_the_meta_device_refuses_the_same():
    with torch.device("meta"):
        stack = stack_of(Careless)
    with pytest.raises(NormLabError, match=r"write\.gate is not initialised"):
        stack.to_empty(device="cpu").init_()


def test_a_learned_parameter_done_right_starts_where_it_should():
    model = normlab.Decoder(config(Careful))
    gates = [value for name, value in model.named_parameters() if name.endswith("gate")]
    assert len(gates) == 4
    assert all(value.item() == torch.tensor(GATE) for value in gates)


def test_initialising_again_starts_again():
    stack = stack_of(Careful).init_()
    before = {name: value.clone() for name, value in stack.named_parameters() if value.ndim == 1}
    for parameter in stack.parameters():
        parameter.data += 1.0
    stack.init_()
    for name, value in before.items():
        assert torch.equal(stack.get_parameter(name), value), name


class Learned(Attention):
    """Attention of the user's with a vector that it fills itself."""

    def __init__(self):
        super().__init__(16, 2)
        self.lift = nn.Parameter(torch.full((16,), 0.25))
        self.register_buffer("table", torch.arange(4.0))


def own_blocks() -> list[tuple[nn.Module, nn.Module]]:
    return [(Learned(), MLP(16, 24))]


class YourModel(nn.Module):
    """A model of the user's around a stack, which calls `initialise_` for all of it."""

    def __init__(self, write: type):
        super().__init__()
        self.embed_tokens, self.stack = nn.Embedding(32, 16), stack_of(write)

    def init_(self):
        initialise_(self, self.stack.bound, find_roles(self))


def test_a_model_of_the_user_around_a_stack_refuses_the_same():
    with torch.device("meta"):
        careful, careless = YourModel(Careful), YourModel(Careless)
    careful.to_empty(device="cpu").init_()
    with pytest.raises(NormLabError, match=r"gated: stack\.layers\.0\.block\.steps\.0\.write\.gate is not initialised"):
        careless.to_empty(device="cpu").init_()


def test_modules_of_the_user_keep_what_they_hold():
    stack = normlab.Stack("pre", own_blocks(), 16).init_()
    assert bool((stack.layers[0].branches[0].lift == 0.25).all())


def test_modules_of_the_user_lose_it_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(normlab.Stack("pre", own_blocks(), 16))
    model.to_empty(device="cpu")
    with pytest.raises(NormLabError, match=r"layers\.0\.branches\.0\.lift is not initialised: .*give Learned a"):
        model[0].init_()


def test_a_buffer_of_the_user_may_be_filled_afterwards():
    with torch.device("meta"):
        stack = normlab.Stack("pre", own_blocks(), 16)
    stack.to_empty(device="cpu")
    first = stack.layers[0].branches[0]
    assert bool(first.table.isnan().all())
    stack.to("cpu")  # what is no longer on the meta device is left alone
    first.table.copy_(torch.arange(4.0))
    stack.double()
    assert first.table.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_weights_may_be_loaded_in_place_of_initialising():
    with torch.device("meta"):
        late = stack_of(Careless)
    state = stack_of(Careful).init_().state_dict()
    late.to_empty(device="cpu").load_state_dict(state)
    for name, value in late.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("name", normlab.list_schemes())
@pytest.mark.parametrize("topology", ["serial", "parallel"])
def test_the_check_before_a_run_passes_all_of_ours_and_draws_no_numbers(name, topology):
    if topology in normlab.scheme(name).topologies:
        model = normlab.DecoderConfig(scheme=name, topology=topology, **SIZE)
        before = torch.get_rng_state()
        model.check_start()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_no_scheme_of_ours_leaves_anything_out(name):
    model = normlab.Decoder(normlab.DecoderConfig(scheme=name, bias=name != "ngpt", **SIZE))
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def sharded(rank: int, port: int, results: str) -> None:
    store = join(rank, port)
    found = []
    for write in (Careless, Careful):
        with torch.device("meta"):
            model = normlab.Decoder(config(write))
        for layer in model.stack.layers:
            fully_shard(layer)
        fully_shard(model)
        try:
            model.to_empty(device="cpu").init_()
            found.append("fine")
        except NormLabError as error:
            found.append(str(error))
    with open(f"{results}{rank}", "w") as file:
        file.write("\n".join(found))
    leave(rank, store)


@pytest.mark.full
def test_every_rank_refuses_what_lies_on_one(tmp_path):
    # A gate of one element lies on the first rank alone.
    spawn(sharded, args=(free_port(), str(tmp_path / "rank")), nprocs=2)
    for rank in (0, 1):
        refused, fine = (tmp_path / f"rank{rank}").read_text().split("\n")
        assert "write.gate is not initialised" in refused
        assert fine == "fine"
