"""Depth transfer: the identity at the base depth, the table elsewhere, and updates that do not depend on the depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import normlab
from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.models.decoder import Decoder
from normlab.roles import OUTPUTS
from normlab.schemes.contract.scales import ConstantScale
from normlab.schemes.contract.scheme import Scheme
from normlab.train.optimiser import build
from normlab.train.transfer import Transfer
from tests.train.test_transfer import VOCABULARY, chain

BASE, WIDTH = 4, 32
DERIVED = [name for name in normlab.list_schemes() if normlab.scheme(name).depth_transfer == "derived"]
ASSUMED = [name for name in normlab.list_schemes() if name not in DERIVED]


def config_of(scheme, depth, **options) -> DecoderConfig:
    size = {"depth": depth, "dim": WIDTH, "heads": WIDTH // 16, "vocab_size": VOCABULARY, "max_length": 32}
    return DecoderConfig(scheme=scheme, **size | options)


def made(scheme, depth, base, seed=0, **options) -> tuple[Decoder, Transfer | None]:
    """A model and its transfer from `base` blocks; without a base as it always was."""
    torch.manual_seed(seed)
    config = config_of(scheme, depth, **options)
    transfer = Transfer.to(config, None, base)
    if transfer is None:
        return config.build(), None
    model = transfer.design(config).build()
    transfer.init_(model)
    return model, transfer


def batch(seed=0):
    text = chain(8, 32, seed)
    return text[:, :-1], text[:, 1:]


# -- the rule of every scheme ------------------------------------------------------------------------------------------


def test_which_schemes_have_a_derived_rule():
    # Those that add a branch of a normalised state. Where branches read the state itself (none, output), its initial
    # size, or its growth, would depend on the depth under the same rule.
    assert DERIVED == ["layerscale", "lns", "peri", "pre"]


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_at_the_base_depth_nothing_changes(name):
    scheme = normlab.scheme(name)
    assert scheme.at_depth(BASE, BASE) is scheme
    assert len(scheme.depth_rule) > 20
    (plain, _), (moved, transfer) = made(name, BASE, None), made(name, BASE, BASE)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))
    groups, others = build(moved, lr=1e-2, transfer=transfer).param_groups, build(plain, lr=1e-2).param_groups
    assert [(g["lr"], g["eps"]) for g in groups] == [(g["lr"], g["eps"]) for g in others]


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_rule_divides_branches_and_keeps_the_initialisation(name):
    scheme = normlab.scheme(name)
    deep = scheme.at_depth(BASE, 32)
    assert deep.cut == 8
    assert deep.at_depth(32, BASE) == scheme
    assert scheme.at_depth(8, 12).cut == 1.5
    base, here = made(name, BASE, None)[0], made(name, 32, BASE)[0]
    factors = [here.stack.layers[5].block.steps[0].write.step, base.stack.layers[1].block.steps[0].write.step]
    sizes = [part.value if isinstance(part, ConstantScale) else 1.0 for part in factors]
    assert sizes[0] == pytest.approx(sizes[1] / 8)
    stds = [
        {role.role: model.stack.bound.initial_std(role, 0.02) for role in model.find_roles() if role.is_matrix}
        for model in (base, here)
    ]
    assert stds[0] == stds[1]


def test_output_projections_are_not_divided_by_the_depth_as_well():
    plain, deep = made("pre", 32, None)[0], made("pre", 32, BASE)[0]
    for old, new in zip(plain.find_roles(), deep.find_roles(), strict=True):
        # √(2·32) against √(2·4), whatever the branch multiplier.
        ratio = 8**0.5 if new.role in OUTPUTS else 1.0
        assert torch.allclose(new.view(), ratio * old.view(), rtol=1e-5)


@pytest.mark.parametrize("name", ASSUMED)
def test_other_schemes_keep_their_own_constants(name):
    scheme = normlab.scheme(name)
    assert scheme.at_depth(BASE, 32) is scheme
    (plain, _), (deep, transfer) = made(name, 8, None), made(name, 8, BASE)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), deep.parameters(), strict=True))
    assert set(transfer.epsilons(deep).values()) == {1.0}


def test_a_scheme_of_ones_own_claims_nothing():
    assert Scheme.depth_transfer == "hypothesis"


# -- epsilon -----------------------------------------------------------------------------------------------------------


def test_epsilon_by_the_table():
    config = config_of("pre", 32, dim=64, heads=4)
    transfer = Transfer(32, 64, BASE, 32)
    model = transfer.design(config).build(device="meta")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for kind in ("adamw", "muon"):
        optimiser = build(model, kind=kind, lr=1e-2, eps=1e-6, transfer=transfer)
        for group in optimiser.param_groups:
            inside = {names[id(parameter)].startswith("stack.layers.") for parameter in group["params"]}
            assert len(inside) == 1
            # m_N = 2 and m_L = 8; Muon has no ε.
            smaller = 1 / 16 if inside == {True} and group["rule"] == "adamw" else 1.0
            assert group["eps"] == pytest.approx(1e-6 * smaller)


@pytest.mark.parametrize("name", ["pre", "post"])
def test_the_width_alone_divides_epsilon_too(name):
    transfer = Transfer(32, 128)
    model = config_of(name, 2, dim=128, heads=8).build(device="meta")
    for parameter, factor in transfer.epsilons(model).items():
        assert factor == (1 / 4 if parameter.startswith("stack.layers.") else 1.0)


def alike(name, depth, base, eps):
    """A model whose blocks are all the same and return zero, after one step of AdamW, and the step's ε."""
    model, transfer = made(name, depth, base, zero_outputs=True)
    start = made(name, BASE, None, zero_outputs=True)[0].state_dict()
    block = {key.split(".", 3)[3]: value for key, value in start.items() if key.startswith("stack.layers.0.")}
    own = {f"stack.layers.{k}.{key}": value for k in range(depth) for key, value in block.items()}
    model.load_state_dict({key: value for key, value in start.items() if not key.startswith("stack.layers.")} | own)
    optimiser = build(model, lr=1e-2, eps=eps, transfer=transfer)
    tokens, targets = batch()
    model.loss(tokens, targets).backward()
    optimiser.step()
    return {key: value for key, value in model.state_dict().items() if key.startswith("stack.layers.0.")}


@pytest.mark.parametrize("name", ["pre", "layerscale"])
def test_the_first_step_of_adamw_is_the_same_at_every_depth(name):
    # Every block reads the embedding and writes nothing, so that its gradient is that of the base over m_L, exactly.
    # ε is as large as gradients: with an ε that did not follow them, steps would shrink with the depth.
    eps = 1e-2
    base = alike(name, BASE, BASE, eps)
    for depth in (8, 16):
        deep = alike(name, depth, BASE, eps)
        # Means over tokens of products, in fp32.
        assert all(torch.allclose(deep[key], base[key], rtol=1e-4, atol=1e-7) for key in base)
    moved = base["stack.layers.0.branches.1.down.weight"].abs()
    assert 1e-5 < moved.mean() < 0.9e-2


# -- updates over depth ------------------------------------------------------------------------------------------------
# To first order a step of AdamW changes the loss by Σ g·ΔW, of which every block has its share. Under the rule a share
# is ∝ 1/depth, and their sum does not depend on the depth: the slope of its logarithm over that of the depth is 0.
# Without the rule a share does not shrink: the slope is 1, or 1/2 where the state grows and its norm divides gradients.
FLAT = 0.1
DEPTHS = (4, 8, 16, 32)
# Peri-LN with small steps: from Δt = 1 the state shrinks from RMS 3 at 4 blocks to 1.4 at 32, by its law.
CHECKED = ["layerscale", "lns", "peri(step=0.1)", "pre"]


def shares(name, depth, base, seed) -> np.ndarray:
    """By how much one step changes the loss through each block."""
    model, transfer = made(name, depth, base, seed)
    optimiser = build(model, lr=1e-5, transfer=transfer)
    model.loss(*batch(seed)).backward()
    parameters = list(model.stack.layers.parameters())
    old = [p.detach().clone() for p in parameters]
    optimiser.step()
    moved = [float((p.grad * (p.detach() - o)).sum()) for p, o in zip(parameters, old, strict=True)]
    return -np.array(moved).reshape(depth, -1).sum(1)


def slopes(name, base) -> tuple[float, float]:
    """Exponents in the depth of the change through all blocks, and through one of them."""
    found = [np.mean([shares(name, depth, base, seed) for seed in (0, 1)], axis=0) for depth in DEPTHS]
    logs = np.log([(share.sum(), share.mean()) for share in found])
    return tuple(np.polyfit(np.log(DEPTHS), logs, 1)[0])


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKED)
def test_updates_do_not_depend_on_the_depth(name):
    whole, block = slopes(name, BASE)
    assert abs(whole) < FLAT
    assert abs(block + 1.0) < FLAT


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKED)
def test_without_the_rule_updates_grow(name):
    whole, block = slopes(name, None)
    assert whole > 0.5 - FLAT
    assert block > -0.5 - FLAT


# -- the rate itself ---------------------------------------------------------------------------------------------------

RATES = [2.0**-k for k in (8, 7, 6, 5, 4)]
"""A factor 2 apart, as the first rates of `normlab compare --lrs auto`; √2 apart, losses hardly differ."""


def final_loss(name, depth, base, lr, steps=40) -> float:
    # Matrices of the size that keeps activations at width 32: from 0.02 the first steps would only make them grow.
    model, transfer = made(name, depth, base, init_std=0.18)
    optimiser, losses = build(model, lr=lr, transfer=transfer), []
    for step in range(steps):
        loss = model.loss(*batch(step))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-5:]) / 5


@pytest.mark.full
@pytest.mark.parametrize("name", DERIVED)
def test_a_rate_tuned_with_4_blocks_holds_with_32(name):
    small, deep = ([final_loss(name, depth, BASE, lr) for lr in RATES] for depth in (BASE, 32))
    best, there = int(np.argmin(small)), int(np.argmin(deep))
    # Not at an end of the grid, where "within a step" would mean little.
    assert 0 < best < len(RATES) - 1
    assert abs(there - best) <= 1
    assert deep[best] < small[best] + 0.02


@pytest.mark.full
def test_without_the_rule_it_does_not():
    lr = 2.0**-7
    assert final_loss("pre", 32, None, lr) > final_loss("pre", 32, BASE, lr) + 0.2


# -- runs --------------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(NormLabError, match="base_depth must be at least 1, got 0"):
        TrainConfig(base_depth=0)
    with pytest.raises(NormLabError, match="depths must be at least 1"):
        Transfer(64, 64, 0, 4)
    with pytest.raises(NormLabError, match="expected two depths or none"):
        Transfer(64, 64, 4)
    with pytest.raises(NormLabError, match="made for depth 8, but the model's is 4"):
        Transfer(64, 64, 4, 8).design(config_of("pre", 4))
    with pytest.raises(NormLabError, match="made for depth 8, but the model's is 4"):
        Transfer(WIDTH, WIDTH, 4, 8).epsilons(made("pre", 4, None)[0])


def test_the_name_of_a_run_says_so_only_if_it_is_used():
    plain, deep = TrainConfig(model=config_of("pre", 8)), TrainConfig(model=config_of("pre", 8), base_depth=4)
    assert "base_depth" not in plain.to_dict()
    assert TrainConfig.from_dict(deep.to_dict()) == deep
    assert plain.identity != deep.identity
    # The scheme keeps its name; what is built follows the rule.
    assert deep.name.startswith("pre-lr")
    assert str(deep.design.scheme) == "pre(cut=2)"
    assert plain.design is plain.model
