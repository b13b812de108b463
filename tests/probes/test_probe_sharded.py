"""A look at a model that FSDP2 shards over two processes: every process sees its own batch and its own shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from normlab.checks.callbacks import Watch
from normlab.probes.probe import probe
from tests.probes.loops import decoder, text
from tests.ranks import free_port, join, leave, spawn

RANKS = 2


def loss_of(model, batch) -> torch.Tensor:
    # Through the module's own call: FSDP gathers weights in its hooks.
    logits = model(batch[0])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def step(model, batch, number: int = 0) -> dict:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe(model, step=number) as look:
        loss = loss_of(model, batch)
        look.record(loss=loss)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return look.profile.to_dict()


def sharded(rank: int, port: int, folder: str) -> None:
    store = join(rank, port)
    model = decoder()
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = tuple(part.chunk(RANKS)[rank] for part in text())
    found = step(model, mine)
    # A watch looks in the first process alone: the other one must not wait for it, nor it for the other.
    watch = Watch(model, every=2, out=Path(folder) / "profiles.jsonl")
    for number in range(3):
        with watch.step(number):
            loss_of(model, mine).backward()
    Path(folder, f"{rank}.json").write_text(json.dumps(found | {"looks": len(watch.profiles)}))
    leave(rank, store)


@pytest.mark.full
def test_each_process_measures_its_batch_and_its_shards(tmp_path):
    spawn(sharded, args=(free_port(), str(tmp_path)), nprocs=RANKS)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    whole = step(decoder(), text())
    for rank, profile in enumerate(found):
        alone = step(decoder(), tuple(part.chunk(RANKS)[rank] for part in text()))
        for name in ("rms", "cos", "ang", "attn_entropy", "loss"):
            torch.testing.assert_close(profile[name], alone[name], rtol=1e-4, atol=1e-5)
        # FSDP averages gradients over processes in the backward pass: the state's own gradient is that of its batch.
        torch.testing.assert_close(profile["grad_h"], alone["grad_h"], rtol=1e-4, atol=1e-6)
    # The rows of a matrix are shared out: each process knows half of the squares, and doubles them.
    for name in ("grad_w", "upd_ratio"):
        for place, expected in enumerate(whole[name]):
            squares = [profile[name][place] ** 2 for profile in found]
            assert abs(sum(squares) / RANKS / expected**2 - 1) < 0.05, name
    assert [profile["looks"] for profile in found] == [1, 0]
    assert len((tmp_path / "profiles.jsonl").read_text().splitlines()) >= 2
