"""check_scheme names the rule that a scheme breaks; what it says of healthy ones is tests/schemes/test_contract.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import normlab
from normlab import NormLabError
from normlab.schemes import Law, Scheme, Step, Write
from normlab.schemes.pre import Pre
from normlab.testing import RULES, check_scheme
from tests.documentation.commands import blocks

ROOT = Path(__file__).parents[1]
QUICK = ("compile", "derivatives", "decoder", "depth", "edges")
"""Rules that take longest: left out where another one is to fire."""


@dataclass(frozen=True, kw_only=True)
class Healthy(Scheme):
    """Healthy: adds, with a gate that is learned."""

    name = "healthy"
    gate: float = 0.5
    """Start of the gate."""

    def sublayer(self, site):
        return Step(self.new_write(site), read=self.new_norm(site.dim))

    def new_write(self, site):
        return Gate(self.gate * site.dt)


class Gate(Write):
    shape: tuple[int, ...] = (1,)

    def __init__(self, start):
        super().__init__()
        self.start = start
        self.gate = nn.Parameter(torch.empty(self.shape))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.gate, self.start)

    def forward(self, state, update):
        return (state + self.gate * update).to(state.dtype)

    def rms_bound(self, state, update):
        return state + self.gate.abs().item() * update


def writes(cls: type[Write]) -> type[Healthy]:
    """The same scheme with another write."""

    @dataclass(frozen=True, kw_only=True)
    class Broken(Healthy):
        def new_write(self, site):
            return cls(self.gate * site.dt)

    return Broken


class Unwritten(Write):
    def __init__(self, start):
        super().__init__()
        self.gate = nn.Parameter(torch.full((1,), start))

    forward = Gate.forward


class Detached(Gate):
    def forward(self, state, update):
        return state + self.gate * update.detach()


class Unused(Gate):
    def forward(self, state, update):
        return (state + update).to(state.dtype)


class Scalar(Gate):
    shape = ()


class Divides(Gate):
    def forward(self, state, update):
        return (state + self.gate * update / update.norm(dim=-1, keepdim=True)).to(state.dtype)


class Widens(Gate):
    def forward(self, state, update):
        return state.float() + self.gate * update.float()


class Coarse(Gate):
    """Loses the precision of float64 on the way."""

    def forward(self, state, update):
        return (state.float() + self.gate.float() * update.float()).to(state.dtype)


class Boasts(Gate):
    def rms_bound(self, state, update):
        return 0.5 * state


class Hides(Gate):
    """Holds something that no state dict knows."""

    def __init__(self, start):
        super().__init__(start)
        self.secret = torch.rand(())

    def forward(self, state, update):
        return (state + self.secret * self.gate * update).to(state.dtype)


class Peeks(Gate):
    """Centres updates over the sequence: a token sees those that it is to predict."""

    def forward(self, state, update):
        return super().forward(state, update - update.mean(-2, keepdim=True))


class Shares(Gate):
    """Centres updates over the batch."""

    def forward(self, state, update):
        return super().forward(state, update - update.mean(0, keepdim=True))


class Looks(Gate):
    """Asks for a number in the middle of a step, which no compiled graph can."""

    def forward(self, state, update):
        return super().forward(state, update) if self.gate.item() > 0 else state


@pytest.mark.parametrize(
    ("write", "rule", "words"),
    [
        (Unwritten, "initialisation", "gate is not initialised"),
        (Unused, "gradients", "write.gate gets no gradient"),
        (Detached, "gradients", "steps.0.read.weight gets no gradient"),
        (Scalar, "dimensions", "write.gate has no dimension; make it of shape"),
        (Divides, "edges", "zero update in float32: the output is not finite"),
        (Widens, "edges", "in bfloat16: a block returns torch.float32"),
        (Peeks, "tokens", "a token changes the states of other tokens"),
        (Shares, "tokens", "a token changes the states of other tokens"),
        (Coarse, "derivatives", "Jacobian mismatch"),
        (Boasts, "certificate", "above the bound"),
        (Hides, "copies", "the state dict does not hold all of the network"),
        (Hides, "meta-device", "is not on the expected device meta"),
        (Looks, "compile", "[Dd]ata.dependent"),
    ],
)
def test_a_broken_write_is_named(write, rule, words):
    with pytest.raises(AssertionError, match=rf"healthy breaks 1 of 1 rules:\n  {rule}: .*{words}"):
        check_scheme(writes(write), only=[rule])


@dataclass(frozen=True, kw_only=True)
class Inert(Healthy):
    colour: str = "red"
    size: int = 3


@dataclass(frozen=True, kw_only=True)
class Decays(Healthy):
    def decays(self, role):
        return True


@dataclass(frozen=True, kw_only=True)
class WrongLaw(Healthy):
    def law(self, depth):
        return Law(speed=None, rms=lambda i: 2.0, forward="linear", backward="not known")


@dataclass(frozen=True, kw_only=True)
class Blurs(Healthy):
    """What probes and the head see of a token is the mean of all."""

    def hidden(self, state):
        return state.mean(-2, keepdim=True).expand_as(state)


@dataclass(frozen=True, kw_only=True)
class WholeSteps(Healthy):
    """Takes no notice of a refined step's length."""

    def new_write(self, site):
        return Gate(self.gate)


@dataclass(frozen=True, kw_only=True)
class Grows(Healthy):
    """Its number of parameters is no polynomial of depth and width."""

    def new_write(self, site):
        return RoundedUp(site.dim)


class RoundedUp(Gate):
    def __init__(self, dim):
        self.shape = (1 << dim.bit_length(),)
        super().__init__(0.1)

    forward, rms_bound = Write.forward, Write.rms_bound


@pytest.mark.parametrize(
    ("scheme", "rule", "words"),
    [
        (Inert, "options", r"size does nothing: tried 4; pass others=\{'size': value\}"),
        (Decays, "optimiser-groups", "weight decay acts on a gain"),
        (WrongLaw, "law", r"rms\(0\) must be 1, got 2.0"),
        (Blurs, "tokens", "a token changes the states of other tokens"),
        (WholeSteps, "refinement", "refined steps are whole ones; multiply what a step adds by site.dt"),
        (Grows, "card", "but the card's formula gives"),
    ],
)
def test_a_broken_rule_is_named(scheme, rule, words):
    with pytest.raises(AssertionError, match=rf"{rule}: .*({words})"):
        check_scheme(scheme, only=[rule])


def test_every_broken_rule_is_told_at_once():
    with pytest.raises(AssertionError) as caught:
        check_scheme(writes(Scalar), only=["gradients", "dimensions", "certificate", "card"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "healthy breaks 1 of 4 rules",
        "  dimensions",
    ]


def test_a_healthy_scheme_passes_as_class_as_object_and_by_name():
    rules = [name for name in RULES if name not in QUICK]
    assert check_scheme(Healthy, skip=QUICK) == rules
    assert check_scheme(Healthy(gate=0.2), only=["gradients"]) == ["gradients"]
    assert check_scheme("pre(step=0.5)", only=["text", "options"]) == ["text", "options"]


def test_other_values_may_be_given():
    with pytest.raises(AssertionError, match="gate does nothing"):
        check_scheme(Healthy, only=["options"], others={"gate": 0.5})
    check_scheme(Healthy, only=["options"], others={"gate": 0.9})


def test_bad_input_gets_one_line():
    with pytest.raises(NormLabError, match="unknown rule 'gradient'; did you mean 'gradients'"):
        check_scheme(Pre, only=["gradient"])
    with pytest.raises(NormLabError, match="Gate is not a scheme but a class of another kind"):
        check_scheme(Gate)  # type: ignore[arg-type]


@pytest.mark.full
def test_it_runs_as_a_plain_script_and_leaves_random_numbers_alone():
    code = (
        "import sys, torch, normlab\n"
        "torch.manual_seed(3); expected = torch.rand(2); torch.manual_seed(3)\n"
        "normlab.testing.check_scheme(sys.argv[1], skip=['compile'])\n"
        "assert torch.equal(torch.rand(2), expected) and 'pytest' not in sys.modules"
    )
    call = [sys.executable, "-c", code, str(ROOT / "examples" / "custom_scheme.py") + ":Balanced"]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_normlab_knows_it():
    assert normlab.testing.check_scheme is check_scheme


def test_the_scheme_in_the_list_of_concepts_keeps_the_contract(tmp_path):
    (block,) = blocks(ROOT / "docs" / "concepts-of-a-scheme.md", "python")
    (tmp_path / "gain.py").write_text(block)
    assert "certificate" in check_scheme(f"{tmp_path / 'gain.py'}:Gain")
