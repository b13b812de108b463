"""Optimisers: the scheme's rules in every group, Muon against its polynomial and against torch's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

import normlab
from normlab import Decoder, DecoderConfig, NormLabError
from normlab.probes.first_nonfinite import first_nonfinite
from normlab.probes.sharded import whole
from normlab.train.monitor.profile import profile
from normlab.train.optimiser import _QUINTIC, _ROUNDS, MOMENTUM, Muon, build, orthogonalise, set_lr
from normlab.train.transfer import HIDDEN, Transfer
from tests.matrix import parametrize, quick_if
from tests.ranks import free_port, join, leave, spawn

SIZE = {"depth": 2, "dim": 32, "heads": 4, "vocab_size": 61, "max_length": 64}
EXPERTS = {"experts": 3, "top_k": 2, "shared_hidden": 128}


def made(scheme="pre", **options) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(scheme=scheme, **SIZE | options))


def fill_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


# -- groups ------------------------------------------------------------------------------------------------------------


@quick_if(lambda name, kind: kind == "adamw" or name in ("pre", "ngpt", "geonorm", "mhc"))
@pytest.mark.parametrize("name", normlab.list_schemes())
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@parametrize("base", [None, 8], quick=[8])
def test_every_parameter_stands_in_one_group_with_the_schemes_rules(name, kind, base):
    model = made(name, **EXPERTS)
    transfer = Transfer(base, 32) if base else None
    optimiser = build(model, kind=kind, lr=1e-2, weight_decay=0.1, transfer=transfer)
    held = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    rules = {}
    for group in model.param_groups(lr=1e-2, weight_decay=0.1):
        rules |= {id(p): (group["lr"], group["weight_decay"]) for p in group["params"]}
    rates = {rule: transfer.rates(model, rule) for rule in ("adamw", "muon")} if transfer else None
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimiser.param_groups:
        for p in group["params"]:
            factor = rates[group["rule"]][names[id(p)]] if rates else 1.0
            assert group["lr"] == group["initial_lr"] == rules[id(p)][0] * factor
            assert group["weight_decay"] * factor == pytest.approx(rules[id(p)][1])


def test_muon_takes_hidden_matrices_and_nothing_else():
    model = made(**EXPERTS)
    optimiser = build(model, kind="muon", lr=1e-2)
    taken = {id(p) for group in optimiser.param_groups if group["rule"] == "muon" for p in group["params"]}
    expected = {id(role.parameter) for role in model.find_roles() if role.role in HIDDEN}
    assert taken == expected
    assert any(p.ndim == 3 for p in model.parameters() if id(p) in taken)


def test_the_rate_is_a_share_of_the_groups_own():
    optimiser = build(made(), kind="muon", lr=1e-2, transfer=Transfer(8, 32))
    full = [group["lr"] for group in optimiser.param_groups]
    assert len(set(full)) > 1
    set_lr(optimiser, 0.25)
    set_lr(optimiser, 0.5)
    assert [group["lr"] for group in optimiser.param_groups] == [0.5 * lr for lr in full]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_adamw_is_torchs_own():
    model, other = made(), made()
    ours = build(model, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    theirs = torch.optim.AdamW(other.param_groups(lr=1e-2, weight_decay=0.1), betas=(0.8, 0.9), eps=1e-6, fused=True)
    for k in range(3):
        for m, optimiser in ((model, ours), (other, theirs)):
            fill_gradients(m, k)
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (2, 3, 7, 4), (1, 8)])
def test_orthogonalise_is_a_polynomial_of_singular_values(shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        values = a * values + b * values**3 + c * values**5
    expected = left * values.unsqueeze(-2) @ right
    # Five rounds amplify a rounding error by at most 3.4445 each.
    assert torch.allclose(orthogonalise(matrices), expected, rtol=0, atol=3.45**5 * 1e-15)


def test_singular_values_end_near_one():
    values = torch.linalg.svdvals(orthogonalise(torch.randn(40, 30, dtype=torch.float64)))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_zero_stays_zero():
    assert not orthogonalise(torch.zeros(3, 4)).any()


def test_muon_is_torchs_own_on_whole_matrices():
    # Torch's works in bf16: 2^-8 a product, over five rounds of three that each amplify by less than 3.5 at most.
    model = made()
    optimiser = build(model, kind="muon", lr=1e-2, weight_decay=0.1)
    downs = [layer.branches[1].down.weight for layer in model.stack.layers]
    before = [p.detach().clone() for p in downs]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in downs]
    theirs = torch.optim.Muon(copies, lr=1e-2, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for k in range(3):
        fill_gradients(model, k)
        for copied, p in zip(copies, downs, strict=True):
            copied.grad = p.grad.clone()
        optimiser.step()
        theirs.step()
    for p, copied, start in zip(downs, copies, before, strict=True):
        assert float((p - copied).detach().norm() / (copied - start).detach().norm()) < 0.03


def test_parts_and_experts_are_orthogonalised_alone():
    model = made(**EXPERTS)
    optimiser = build(model, kind="muon", lr=1.0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model)
    optimiser.step()
    for role in model.find_roles():
        if role.role in HIDDEN:
            moved = start[role.name] - role.parameter.detach()
            part = moved.narrow(role.output_axis, role.start, role.fans[1])
            values = torch.linalg.svdvals(part) / (0.2 * math.sqrt(max(part.shape[-2:])))
            # Random square matrices have singular values near zero, which five rounds do not lift all the way.
            assert float(values.max()) < 1.3
            assert float(values.median()) > 0.6
            # min(A, B) singular values of about one in A · B entries, times 0.2 √max(A, B).
            assert 0.6 * 0.2 < float(part.square().mean().sqrt()) < 1.2 * 0.2


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restart_changes_nothing(kind):
    model, other = made(**EXPERTS), made(**EXPERTS)
    one, two = (build(m, kind=kind, lr=1e-2, weight_decay=0.1) for m in (model, other))
    for k in range(2):
        fill_gradients(model, k)
        one.step()
    other.load_state_dict(model.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for m, optimiser in ((model, one), (other, two)):
        fill_gradients(m, 7)
        set_lr(optimiser, 0.5)
        optimiser.step()
        optimiser.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_parameters_without_gradient_stay():
    model = made()
    optimiser = build(model, kind="muon", lr=1e-2, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimiser.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["pre", "ngpt"])
def test_the_loss_falls(kind, name):
    model = made(name, **EXPERTS)
    optimiser = build(model, kind=kind, lr=1e-2)
    tokens = torch.randint(0, 61, (4, 17))
    losses = []
    for _ in range(15):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        model.after_step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_muon_is_one_optimizer():
    optimiser = build(made(), kind="muon", lr=1e-2)
    assert isinstance(optimiser, Muon)
    assert isinstance(optimiser, torch.optim.Optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "moun"}, "did you mean 'muon'"),
        ({"lr": 0.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"eps": 0.0}, "eps must be"),
    ],
)
def test_bad_options_are_refused_in_one_line(change, message):
    with pytest.raises(NormLabError, match=message) as error:
        build(made(), **{"lr": 1e-3} | change)
    assert "\n" not in str(error.value)


# -- sharded over two processes ----------------------------------------------------------------------------------------


def train_a_little(model, rank, ranks):
    """Two steps of Muon at four times the base width, and what profile and diagnosis say of the result."""
    transfer = Transfer(8, 32)
    transfer.init_(model)
    optimiser = build(model, kind="muon", lr=1e-2, weight_decay=0.1, transfer=transfer)
    text = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
    tokens, targets = text[:, :-1], text[:, 1:]
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
        model.after_step()
    model.loss = lambda a, b, documents=None: F.cross_entropy(model(a).flatten(0, 1), b.flatten())
    rows = profile(model, tokens, targets)
    found = first_nonfinite(model, tokens, targets)
    assert found.forward is found.backward is None
    assert all(p.grad is None for p in model.parameters())
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return weights | {"hidden_rms": torch.tensor(rows["hidden_rms"]), "largest": torch.tensor(found.norm)}


def sharded(rank, port, results):
    store = join(rank, port)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**SIZE))
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu").init_(generator=torch.Generator().manual_seed(7))
    found = train_a_little(model, rank, 2)
    if rank == 0:
        save_file(found, results)
    leave(rank, store)


@pytest.mark.full
def test_two_processes_step_as_one(tmp_path):
    spawn(sharded, args=(free_port(), str(tmp_path / "found.safetensors")), nprocs=2)
    found = load_file(tmp_path / "found.safetensors")
    alone = Decoder(DecoderConfig(**SIZE)).init_(generator=torch.Generator().manual_seed(7))
    expected = train_a_little(alone, 0, 1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("hidden_rms", "largest"):
            # Of the first rank's half of the batch alone, or of the mean over ranks.
            assert torch.allclose(found[name], value, rtol=0.5)
        else:
            # The same sums in two halves: where a gradient is rounding noise, AdamW may step the other way.
            assert (found[name] - value).abs().median() <= 1e-5, name
            assert (found[name] - value).abs().max() <= 4.1e-2, name
