"""Simulations of trained networks: law and blocks have what was learnt, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import normlab
from normlab.dynamics import experiments
from normlab.dynamics.experiments import real_model
from normlab.dynamics.system import laws
from normlab.dynamics.system.flow import Flow, ParticleState
from normlab.dynamics.system.network import ParticleNetwork
from normlab.dynamics.system.read_weights import read_model_attention
from normlab.dynamics.system.weights import RandomWeights, make_attention
from normlab.errors import NormLabError
from normlab.models import tokens
from normlab.models.rotary import rotary_table
from normlab.schemes.contract.law import Law, Value, on_sphere
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scales import LearnedScale
from normlab.targets import resolve
from tests.dynamics.particles import follow, uniform
from tests.matrix import parametrize

SCHEMES = [name for name in laws.law_names() if name != "sqrt"]

BETA, DEPTH, DIM, TIME = torch.tensor([1.5], dtype=torch.float64), 4, 6, 3.0


def _attention():
    return make_attention(RandomWeights(matrices="identity", dim=DIM), beta=BETA)


def _blocks(spec: str, **bind) -> list:
    bound = normlab.scheme(spec).bind(depth=DEPTH, dim=DIM, **bind)
    return [bound.block(k) for k in range(DEPTH)]


@torch.no_grad()
def _set(blocks: list, change) -> list:
    """Every parameter of the scheme but the gains that attention reads through; `change(name, block)` is its value."""
    for k, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if ".read." not in name:
                parameter.copy_(torch.as_tensor(change(name, k)).expand_as(parameter))
    return blocks


def _scalar(name: str, k: int) -> float:
    """Another value in every block, and for every parameter of it."""
    # A large offset would gather all tokens at once, and steps of finite size about a point are never small.
    return 0.01 * (k + 1) if name.endswith(".b") else 0.4 + 0.05 * k + 0.05 * (len(name) % 3)


LEARNT = {
    "post": 1, "deepnorm": 1, "dual": 1, "hybrid": 1, "mix(post_fraction=0.5)": 1, "keel": 1, "spannorm": 2,
    "peri": 1, "peri(gain='offset')": 1, "output": 1, "layerscale": 1, "layerscale(scalar=True)": 1,
    "ngpt": 1, "geonorm": 2, "geonorm(order='decay-first', max_angle=0.3)": 2,
    "geonorm(max_angle=0.3, second_clamp=False)": 2, "geonorm(max_angle=0.3, decay='none')": 2,
}  # fmt: skip
"""Schemes whose step learns something beyond the norm that attention reads through, with how many numbers a block."""


def _turn_error(scheme, blocks, exact: ParticleState, begin: ParticleState, cut: int, time: float) -> float:
    """Of directions: a law carries the radius of its start on where a norm stands on the main path."""
    network = ParticleNetwork(scheme, _attention(), depth=DEPTH, cut=cut, learnt=blocks)
    return float((next(network.orbit(begin, [time])).theta - exact.theta).abs().max())


@parametrize("spec", LEARNT, quick=("mix(post_fraction=0.5)", "ngpt"))
def test_first_order_toward_the_law_of_what_was_learnt(spec):
    """Half the step, half the error, with other values in every block: the law has them right, each at its time."""
    scheme, blocks, begin = normlab.scheme(spec), _set(_blocks(spec), _scalar), uniform(5, DIM)
    law = laws.learnt_law(scheme, blocks)
    time = 1.0 if law.reads_state else TIME
    assert [len(value.blocks) for value in law.values] == [DEPTH] * LEARNT[spec]
    exact, plain = (follow(Flow(one, _attention()), begin, time, tolerance=1e-8)[0] for one in (law, scheme.law(DEPTH)))
    errors = [_turn_error(scheme, blocks, exact, begin, cut, time) for cut in (32, 64)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1.0, abs=0.1)
    # And it is another law than that of initialisation, by more than the network is off.
    assert float((exact.theta - plain.theta).abs().max()) > 2 * errors[1]


@parametrize(
    "spec",
    [*SCHEMES, "peri(output_gain=0.3)", "geonorm(order='decay-first')"],
    quick=["pre", "keel", "ngpt", "peri(output_gain=0.3)", "geonorm(order='decay-first')"],
)
@parametrize("dtype", [torch.float64, torch.float32], quick=[torch.float32])
def test_initial_values_change_nothing(spec, dtype):
    """Bit for bit, whatever fp32 makes of 0.05."""
    scheme, blocks = normlab.scheme(spec), _blocks(spec)
    begin = ParticleState(*(part.to(dtype) for part in uniform(5, DIM)))
    time = 1.0 if scheme.law(DEPTH).reads_state else TIME
    for one, other in (
        [follow(Flow(law, _attention()), begin, time, tolerance=1e-5)[0] for law in _laws(scheme, blocks)],
        [
            next(ParticleNetwork(scheme, _attention(), depth=DEPTH, learnt=kept).orbit(begin, [time]))
            for kept in ((), blocks)
        ],
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _laws(scheme, blocks) -> tuple[Law, Law]:
    return scheme.law(DEPTH), laws.learnt_law(scheme, blocks)


def test_vectors_enter_a_law_as_one_number():
    """Factors on what a branch returns as their mean, gains of the main path as their root mean square."""
    vector = torch.tensor([0.5, -0.25, 2.0, 1.0, 0.1, 0.4])
    mean, rms = float(vector.double().mean()), float(vector.double().square().mean().sqrt())
    expected = {"layerscale": mean, "peri": mean, "output": mean, "post": rms, "keel": rms, "spannorm": rms}
    for spec, number in expected.items():
        for value in normlab.scheme(spec).learnt_law(_set(_blocks(spec), lambda *_: vector)).values:
            # Block 0 of KEEL has no norm on its main path.
            assert value.blocks[1:] == pytest.approx([number] * (DEPTH - 1), rel=1e-7)
    (alpha,) = normlab.scheme("ngpt").learnt_law(_set(_blocks("ngpt"), lambda *_: vector)).values
    # The raw parameter is α times 1/(√d · α₀), and |α| is what steps.
    assert alpha.blocks[0] == pytest.approx(0.05 * math.sqrt(DIM) * float(vector.double().abs().mean()), rel=1e-6)


def test_parallel_blocks_and_blocks_of_one_branch():
    for bind in ({"topology": "parallel"}, {"branches": 1}, {"topology": "parallel", "branches": 3}):
        blocks, begin = _set(_blocks("post", **bind), _scalar), uniform(5, DIM)
        network = ParticleNetwork(normlab.scheme("post"), _attention(), depth=DEPTH, learnt=blocks)
        end, gain = next(network.orbit(begin, [1.0])), _scalar("steps.0.write.norm.weight", 0)
        x = begin.theta + _attention()(begin.theta)
        torch.testing.assert_close(end.theta, x / x.norm(dim=-1, keepdim=True))
        torch.testing.assert_close(end.radius, torch.full_like(end.radius, gain), rtol=1e-7, atol=0)


def test_a_value_holds_from_its_block_to_the_next():
    value = Value("x", 1.0).learnt([2.0, 2.0, 1.0 + 1e-9])
    assert value.blocks == (2.0, 2.0, 1.0)
    assert value.switches == {2.0}
    assert value(torch.tensor([0.0, 1.99, 2.0, 2.5, 3.0, 9.0])).tolist() == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    still = Value("x", 0.05).learnt([float(torch.tensor(0.05))] * 3)
    assert not still.moved
    assert still(torch.zeros(2)) == 0.05
    law = Law(speed=None, rms=on_sphere, forward="bounded", backward="", switches=(0.5,), values=(value,))
    assert law.switches == (0.5, 2.0)


def test_a_scheme_whose_law_knows_no_blocks_keeps_it():
    @dataclass(frozen=True, kw_only=True)
    class Own(normlab.Scheme):
        name = "own-law"

        def sublayer(self, site):
            return Step(Add(site.dt), shape=LearnedScale(site.dim, 0.5))

        def law(self, depth):
            return Law(speed=lambda m: m.radius, rms=on_sphere, forward="linear", backward="", note=f"{depth}")

    scheme = Own()
    blocks = [scheme.bind(depth=DEPTH, dim=DIM).block(k) for k in range(DEPTH)]
    assert laws.learnt_law(scheme, blocks).note == str(DEPTH)
    with pytest.raises(NormLabError, match="5 blocks cannot take over what 4 have learnt"):
        ParticleNetwork(scheme, _attention(), depth=5, learnt=blocks)


# -- the experiment ---------------------------------------------------------------------------------------------------


def _bare(scheme: str):
    """A network whose MLPs return nothing: what is left is attention and the scheme."""
    target = resolve(scheme, length=12, batch_size=2, depth=4)
    model = target.build(seed=0)
    for layer in model.stack.layers:
        layer.branches[1].down.weight.data.zero_()
    target.build = lambda **_: model  # type: ignore[method-assign]
    return target, model


@pytest.fixture
def simulated(monkeypatch):
    """The experiment on a network that was built already, with all positions alike."""
    monkeypatch.setattr(tokens, "rotary_table", lambda at, *rest, **more: rotary_table(0 * at, *rest, **more))

    def run(target):
        monkeypatch.setattr(real_model, "_target", lambda _: target)
        experiment = experiments.EXPERIMENTS["real-model"]
        return experiment.run(experiment.defaults.replace(scheme=(str(target.scheme),), tokens=12, seeds=2))

    return run


VECTORS = ["pre", "post", "peri", "output", "geonorm", "keel", "deepnorm", "lns", "mix", "layerscale", "dual"]


@parametrize("scheme", VECTORS, quick=["peri", "post", "layerscale", "geonorm"])
def test_blocks_keep_what_a_network_has_learnt(scheme, simulated):
    """Every vector of entry and blocks: the blocks are the network, to its single precision."""
    target, model = _bare(scheme)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in (model.stack.entry, *(layer.block for layer in model.stack.layers)):
            for parameter in part.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    distances = {row[0]: row[5] for row in simulated(target).rows if row[1] == "blocks"}
    assert all(distance < 1e-4 for distance in distances.values()), distances


CHANGES = {
    "geonorm": lambda name, _k: 0.05 if name.endswith(".a") else 0.0,
    "geonorm(order='decay-first')": lambda name, _k: 2.0 if name.endswith(".a") else 0.1,
    "ngpt": lambda _name, k: (1 + k) / math.sqrt(64),
    "layerscale": lambda _name, k: 0.5 + 0.5 * k,
    "peri": lambda _name, k: 0.2 + 0.1 * k,
}


@pytest.mark.parametrize("scheme", CHANGES)
def test_a_simulation_moves_as_its_network_does(scheme, simulated):
    """What every block has learnt is changed, and the mean cosine of network, law and blocks goes the same way."""
    target, model = _bare(scheme)
    before = simulated(target)
    _set([layer.block for layer in model.stack.layers], CHANGES[scheme])
    after = simulated(target)
    network, law, blocks = (b - a for a, b in zip(_cosines(before), _cosines(after), strict=True))
    assert abs(network) > 0.01
    # Four whole steps are no continuous time, and nGPT's norms of queries and keys are not in the simulation.
    assert all(0.5 < change / network < 2.0 for change in (law, blocks)), (network, law, blocks)
    assert not any("as learnt" in note for note in before.notes)
    moved = [value for value in read_model_attention(model).law.values if value.moved]
    assert sum("as learnt" in note for note in after.notes) == len(moved) > 0
    figures = {figure.title: figure.curves[0].y for figure in after.figures}
    assert all(figures[f"The law's {value.name}"] == value.blocks for value in moved)


def _cosines(found) -> list[float]:
    """At the last block: the network's, the law's, the blocks'."""
    rows = {row[1]: row for row in found.rows if row[0] == "cosine"}
    return [rows["law"][2], rows["law"][3], rows["blocks"][3]]
