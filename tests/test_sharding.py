"""FSDP2 on two processes: the scheme's rules reach every shard, and training is that of one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

import normlab
from tests.ranks import free_port, join, leave, spawn

SIZE = {"depth": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "hidden": 48}


def train(model: normlab.Decoder, rank: int, ranks: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Three steps on four sequences, shared out over the ranks; the last loss and every weight."""
    optimiser = torch.optim.AdamW(model.param_groups(lr=1e-2, weight_decay=0.1))
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(ranks)[rank]
    for _ in range(3):
        loss = model_loss(model, mine)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()
    weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return loss.item(), {name: weight.detach().clone() for name, weight in weights.items()}


def model_loss(model: normlab.Decoder, tokens: torch.Tensor) -> torch.Tensor:
    # Through the module's own call: FSDP gathers weights in its hooks.
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(rank: int, port: int, scheme: str, results: str) -> None:
    store = join(rank, port)
    with torch.device("meta"):
        model = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **SIZE))
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu").init_(generator=torch.Generator().manual_seed(7))
    _, weights = train(model, rank, 2)
    if rank == 0:
        save_file(weights, results)
    leave(rank, store)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["ngpt", "geonorm", "hybrid", "mhc", "hc", "siamese", "gated", "attnres"])
def test_two_processes_train_as_one(scheme, tmp_path):
    results = str(tmp_path / "weights.safetensors")
    spawn(sharded, args=(free_port(), scheme, results), nprocs=2)
    found = load_file(results)
    alone = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **SIZE))
    alone.init_(generator=torch.Generator().manual_seed(7))
    _, expected = train(alone, 0, 1)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        # The same sums in two halves; Adam divides by the root of a squared gradient, so where that is rounding noise
        # (gradients of order eps) a step of lr may differ in sign. Three steps of 1e-2 at most, and almost nowhere.
        difference = (found[name] - weight).abs()
        assert difference.max() <= 6.1e-2, name
        # Equal streams are the same however they are mixed: at first most logits of mhc have such a gradient.
        assert difference.median() <= (1e-3 if name.endswith("logits.base") else 1e-5), name


def compiled(rank: int, port: int) -> None:
    """The loss of a sharded model is the same after torch.compile(model), though its layers are run from inside."""
    store = join(rank, port)
    model = normlab.Decoder(normlab.DecoderConfig(scheme="peri", **SIZE))
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(rank))
    expected = model_loss(model, tokens)
    found = model_loss(torch.compile(model, backend="aot_eager"), tokens)  # type: ignore[arg-type]
    found.backward()
    # The same operations, some of them in another order.
    assert abs(float(found - expected)) < 100 * torch.finfo(torch.float32).eps
    assert all(parameter.grad is not None for parameter in model.parameters())
    leave(rank, store)


@pytest.mark.full
def test_a_sharded_model_can_be_compiled_as_a_whole():
    spawn(compiled, args=(free_port(),), nprocs=2)


def test_every_row_or_column_has_unit_length_after_a_step():
    from normlab.roles import find_roles

    model = normlab.Decoder(normlab.DecoderConfig(scheme="ngpt", **SIZE))
    model.after_step()
    for role in find_roles(model):
        if role.is_matrix:
            lengths = torch.linalg.vector_norm(role.view(), dim=role.model_axis)
            assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-6), role.name
