"""The decoder: the same function with and without cache, documents apart, sizes known before it is built."""

from __future__ import annotations

import json
import math

import pytest
import torch

import normlab
from normlab import Decoder, DecoderConfig, NormLabError
from normlab.models import MoE
from tests.matrix import parametrize

SIZE = {"depth": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "max_length": 64, "hidden": 48}
# Norms before and after a branch, steps on the sphere, matrices that are constrained, two streams.
SOME = ("pre", "post", "geonorm", "ngpt", "dual")
EXPERTS = {"experts": 4, "top_k": 2, "shared_hidden": 48}


@pytest.fixture(params=normlab.list_schemes())
def name(request) -> str:
    return request.param


def tokens(batch=2, length=12) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(3))


# -- generation ------------------------------------------------------------------------------------------------------


@parametrize("experts", [{}, EXPERTS], quick=[EXPERTS], ids=["dense", "experts"])
@parametrize("name", normlab.list_schemes(), quick=SOME)
def test_generate_with_the_cache_equals_generate_without(name, experts):
    # float64, so that no near-tie between two tokens is decided by the order of a sum. The larger std makes the
    # model's choices depend on its context at all.
    model = Decoder(DecoderConfig(scheme=name, init_std=0.3, **SIZE, **experts)).double()
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}, {"top_p": 0.8}):
        with_cache, without = (
            model.generate(tokens(), 10, use_cache=use, generator=torch.Generator().manual_seed(5), **options)
            for use in (True, False)
        )
        assert torch.equal(with_cache, without)
        assert with_cache.shape == (2, 22)


def test_cached_logits_equal_those_of_one_pass(name):
    model = Decoder(DecoderConfig(scheme=name, init_std=0.3, **SIZE)).double()
    text = tokens()
    with torch.no_grad():
        whole = model(text)
        cache = model.new_cache(2, 12)
        pieces = torch.cat([model(text[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 12))], dim=1)
    # The same sums in another grouping; a few hundred roundings of 2^-53, logits of order ten.
    assert (whole - pieces).abs().max() < 1e-11 * whole.abs().max()


def test_generation_stops_where_it_is_told_to():
    model = Decoder(DecoderConfig(**SIZE))
    greedy = model.generate(tokens(), 10, temperature=0.0)
    stop = int(greedy[0, 14])
    stopped = model.generate(tokens(), 10, temperature=0.0, stop=stop)
    first = (stopped[0, 12:] == stop).nonzero()[0].item() + 12
    assert torch.equal(stopped[0, : first + 1], greedy[0, : first + 1])
    assert (stopped[0, first:] == stop).all()
    assert model.generate(tokens(), 0).shape == (2, 12)


# -- what attention may see ------------------------------------------------------------------------------------------


def test_the_future_does_not_change_the_past(name):
    model = Decoder(DecoderConfig(scheme=name, **SIZE))
    one, two = tokens(), tokens()
    two[:, 8:] = (two[:, 8:] + 1) % 61
    first, second = model(one), model(two)
    assert torch.equal(first[:, :8], second[:, :8])
    assert not torch.allclose(first[:, 8:], second[:, 8:])


def test_packed_documents_are_apart(name):
    model = Decoder(DecoderConfig(scheme=name, **SIZE)).double()
    text = tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    packed = model(text, documents=documents)
    alone = torch.cat([model(text[:, a:b]) for a, b in ((0, 5), (5, 9), (9, 12))], dim=1)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-12 * float(alone.detach().abs().max()))
    assert not torch.allclose(model(text), alone, atol=1e-6)


# -- building --------------------------------------------------------------------------------------------------------


def test_meta_build_equals_direct_build(name):
    config = DecoderConfig(scheme=name, **SIZE)
    torch.manual_seed(11)
    direct = Decoder(config)
    with torch.device("meta"):
        late = Decoder(config)
    assert all(p.is_meta for p in late.parameters())
    torch.manual_seed(11)
    late.to_empty(device="cpu").init_()
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), late.parameters(), strict=True))
    assert torch.equal(direct(tokens()), late(tokens()))


def test_checkpointing_changes_nothing():
    for experts in ({}, EXPERTS):
        grads = []
        for checkpointing in (False, True):
            torch.manual_seed(0)
            model = Decoder(DecoderConfig(checkpointing=checkpointing, **SIZE, **experts))
            model.loss(tokens(), tokens()).backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("stream", ["fp32", "bf16"])
def test_the_stream_has_the_format_that_was_asked_for(name, stream):
    model = Decoder(DecoderConfig(scheme=name, stream=stream, **SIZE)).bfloat16()
    seen: list[torch.dtype] = []
    for layer in model.stack.layers:
        layer.register_forward_hook(lambda _module, _args, state: seen.append(state.dtype))
    assert model(tokens()).isfinite().all()
    assert set(seen) == {{"fp32": torch.float32, "bf16": torch.bfloat16}[stream]}


def test_every_parameter_of_a_decoder_stands_in_one_group(name):
    model = Decoder(DecoderConfig(scheme=name, bias=True, **SIZE))
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EXPERTS, {"mlp": "gelu", "bias": True}, {"tied": None}], ids=str)
def test_counts_are_exact_and_known_beforehand(name, options):
    if name == "ngpt" and options.get("mlp") == "gelu":
        with pytest.raises(NormLabError, match="gate-scale"):
            Decoder(DecoderConfig(scheme=name, **SIZE, **options))
        return
    config = DecoderConfig(scheme=name, **SIZE, **options)
    assert config.num_params() == sum(p.numel() for p in Decoder(config).parameters())


def test_counts_by_hand():
    d, L, V, h, kv = 32, 3, 61, 48, 16
    attention, mlp, gains = d * (d + 2 * kv) + d * d, 3 * d * h, (2 * L + 1) * d
    assert DecoderConfig(**SIZE).num_params() == 2 * V * d + L * (attention + mlp) + gains
    assert DecoderConfig(**SIZE, tied=True).num_params() == V * d + L * (attention + mlp) + gains
    moe = DecoderConfig(**SIZE, experts=4, top_k=2)
    assert moe.num_params() == 2 * V * d + L * (attention + 4 * mlp + 4 * d) + gains
    assert moe.num_params(active=True) == 2 * V * d + L * (attention + 2 * mlp + 4 * d) + gains


def test_flops_count_each_active_weight_six_times():
    config = DecoderConfig.preset("125m", mlp="gelu", tied=True)
    assert config.flops_per_token(1024) == 6 * config.num_params() + 12 * 12 * 768 * 1024
    untied = DecoderConfig.preset("125m", mlp="gelu")
    # The embedding of an untied model is looked up; its head is multiplied.
    assert untied.flops_per_token(1024) == config.flops_per_token(1024)


@pytest.mark.parametrize(("preset", "millions"), [("125m", 124), ("350m", 354), ("1.3b", 1312)])
def test_presets_have_the_size_they_are_named_after(preset, millions):
    # The names are those of models with tied heads.
    assert DecoderConfig.preset(preset, mlp="gelu", tied=True).num_params() / 1e6 == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["pre", "geonorm", "dual"])
def test_memory_is_estimated_without_being_taken(name, precision):
    config = DecoderConfig(scheme=name, **SIZE)
    model = Decoder(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    text = tokens(4, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = model.loss(text, text)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimate = config.memory(4, 32, precision=precision)
    assert loss.isfinite()
    assert estimate.activations == pytest.approx(measured, rel=0.02)
    assert estimate.weights == estimate.gradients == estimate.optimiser // 2 == 4 * config.num_params()
    assert estimate.total == 3 * estimate.weights + estimate.activations + max(estimate.gradients, estimate.loss)
    assert "GiB" in str(estimate)


@parametrize(
    ("size", "batch", "measured"), [("125m", 32, 11.0), ("350m", 32, 28.67), ("1.3b", 16, 41.38)], quick=["125m"]
)
def test_a_compiled_model_is_estimated_as_it_was_measured(size, batch, measured):
    """On one H200: benchmarks/results/2026-11-15-training-h200.json; 125m in docs/log.md."""
    config = DecoderConfig.preset(size, vocab_size=50304, max_length=1024, stream="bf16", tied=True)
    assert config.memory(batch, 1024).compiled().total / 2**30 == pytest.approx(measured, rel=0.06)


def test_a_compiled_model_recomputes_less_where_blocks_are_computed_again():
    saving = DecoderConfig.preset("125m", checkpointing=True).memory(8, 1024)
    assert saving.compiled().activations == saving.activations
    assert 0 < saving.compiled().recomputed < saving.recomputed


def test_checkpointing_is_estimated_to_save_memory():
    plain, saving = (DecoderConfig.preset("125m", checkpointing=c).memory(8, 1024) for c in (False, True))
    assert saving.activations < 0.6 * plain.activations
    assert saving.activations + 12 * saving.recomputed == pytest.approx(plain.activations, rel=1e-6)


# -- experts ---------------------------------------------------------------------------------------------------------


def test_router_losses_are_part_of_the_loss():
    config = DecoderConfig(**SIZE, **EXPERTS, balance_weight=0.5, router_z_weight=0.25)
    model = Decoder(config)
    total = model.loss(tokens(), tokens())
    plain = torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
    routings = [m.routing for m in model.modules() if isinstance(m, MoE)]
    expected = 0.5 * sum(r.balance_loss for r in routings) / 3 + 0.25 * sum(r.z_loss for r in routings) / 3
    assert torch.allclose(total, plain + expected, rtol=1e-6)
    assert all(torch.allclose(r.load.sum(), torch.tensor(1.0)) for r in routings)


# -- training --------------------------------------------------------------------------------------------------------


@parametrize("experts", [{}, EXPERTS], quick=[{}], ids=["dense", "experts"])
@parametrize("name", normlab.list_schemes(), quick=SOME)
def test_a_few_steps_learn_a_repeated_text(name, experts):
    model = Decoder(DecoderConfig(scheme=name, **SIZE, **experts))
    optimiser = torch.optim.AdamW(model.param_groups(lr=1e-2, weight_decay=0.1))
    text = tokens(1, 13).expand(4, -1)
    losses = []
    for _ in range(25):
        loss = model.loss(text[:, :-1], text[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.7 * losses[0]


def test_gains_move_in_bf16_when_kept_as_an_offset():
    moved = {}
    for gain in ("plain", "offset"):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(scheme=normlab.scheme("pre", gain=gain), **SIZE)).bfloat16()
        optimiser = torch.optim.AdamW(model.param_groups(lr=1e-3))
        for _ in range(5):
            loss = model.loss(tokens(), tokens())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        scales = [norm.scale() for norm in model.modules() if isinstance(norm, normlab.norms.RMSNorm)]
        moved[gain] = max(float((scale.detach() - 1).abs().max()) for scale in scales)
    # 1.0 ± 1e-3 rounds back to 1.0 in bf16, whose spacing there is 2^-7.
    assert moved["plain"] == 0.0
    assert moved["offset"] == pytest.approx(5e-3, rel=0.2)


# -- configuration ---------------------------------------------------------------------------------------------------


def test_config_survives_json(name):
    config = DecoderConfig(scheme=name, **SIZE)
    again = DecoderConfig(**json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.scheme == normlab.scheme(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "peery"}, "unknown scheme 'peery'; did you mean 'peri'"),
        ({"scheme": "peri(stp=1)"}, "unknown option of peri 'stp'; did you mean 'step'"),
        ({"heads": 5, "kv_heads": None}, "5 heads do not divide dim 32"),
        ({"kv_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"mlp": "relu"}, "unknown kind of MLP 'relu'"),
        ({"experts": 2, "top_k": 3}, "top_k"),
        ({"experts": 2, "bias": True}, "experts have no biases"),
        ({"stream": "fp8"}, "unknown stream 'fp8'"),
        ({"scheme": "ngpt", "tied": True}, "ngpt needs a head of its own"),
        ({"scheme": "peri", "zero_outputs": True}, "peri forbids zero_outputs"),
        ({"topology": "ring"}, "unknown topology"),
        ({"head_dim": 3}, "head_dim is 3; expected an even number; try 4"),
        ({"rope_theta": -1.0}, "theta is -1.0; expected a positive number"),
        ({"init_std": math.nan}, "init_std must be positive and finite, got nan"),
        ({"init_std": -1.0}, "init_std must be positive and finite, got -1.0"),
        ({"balance_weight": math.nan}, "balance_weight must be a number from 0 on, got nan; try 0.01"),
        ({"router_z_weight": -1.0}, "router_z_weight must be a number from 0 on, got -1.0; try 0.0"),
        ({"shared_hidden": -1}, "shared_hidden must not be negative, got -1"),
        ({"shared_hidden": 8}, "shared_hidden=8 belongs to experts"),
        ({"depth": "3"}, "depth must be a whole number, got '3'; try 4"),
        ({"depth": 1.5}, "depth must be a whole number, got 1.5"),
        ({"kv_heads": 2.0}, "kv_heads must be a whole number, got 2.0; leave it out"),
        ({"heads": None}, "heads must be a whole number, got None"),
    ],
    ids=str,
)
def test_bad_configurations_get_one_clear_line(change, message):
    with pytest.raises(NormLabError, match=message) as caught:
        DecoderConfig(**(SIZE | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(3, dtype=torch.long)), "expected tokens as integers"),
        (lambda m: m(torch.zeros(1, 3)), "expected tokens as integers"),
        (lambda m: m(torch.zeros(1, 65, dtype=torch.long)), "65 tokens exceed max_length=64"),
        (lambda m: m(tokens(), documents=tokens(1)), "documents must have the shape of tokens"),
        (lambda m: m(torch.ones(1, 3, dtype=torch.bool)), "expected tokens as integers"),
        (lambda m: m.generate(torch.zeros(1, 0, dtype=torch.long), 1), r"at least one token .* got shape \(1, 0\)"),
        (lambda m: m.generate(torch.zeros(3, dtype=torch.long), 1), r"at least one token .* got shape \(3,\)"),
        (lambda m: m.generate(tokens(), -1), "max_new_tokens must not be negative"),
        (lambda m: m.router_loss(), "no routing to speak of"),
        (lambda m: m.config.memory(1, precision="fp8"), "unknown precision"),
        (lambda m: DecoderConfig.preset("126m"), "unknown preset '126m'; did you mean '125m'"),
    ],
)
def test_bad_calls_get_one_clear_line(call, message):
    with pytest.raises(NormLabError, match=message) as caught:
        call(Decoder(DecoderConfig(**SIZE)))
    assert "\n" not in str(caught.value)
