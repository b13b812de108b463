"""A check of a model that FSDP2 shards over two processes: certificates and slopes are those of the whole weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import normlab
from normlab.checks.theory.branch_bounds import slopes_by_role
from normlab.checks.theory.certificates import certify, entry_bound
from normlab.probes.sharded import is_sharded, local, whole, whole_vectors
from tests.probes.loops import decoder, text
from tests.probes.test_probe_sharded import RANKS, loss_of
from tests.ranks import free_port, join, leave, spawn

SCHEMES = ("pre", "peri")


def found_of(scheme: str) -> dict:
    model = decoder(scheme)
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = tuple(part.chunk(RANKS)[dist.get_rank()] for part in text())
    # A pass without a backward one: FSDP keeps what it gathered for the outermost module.
    logits = model(mine[0]).detach()
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    proven = certify(model.stack, entry_bound(model, 0.0))
    report = normlab.check(model, batch=mine, loss_fn=loss_of, steps=2)
    kept = [torch.equal(whole(now), old) for now, old in zip(model.parameters(), before, strict=True)]
    assert report.theory is not None
    return {
        "curve": proven.curve,
        "slopes": proven.slopes,
        "by_role": slopes_by_role(model.stack.layers[0]),
        "notes": report.theory.notes,
        "level": report.verdict("certificate").level,
        "kept": all(kept) and is_sharded(model) and torch.equal(model(mine[0]), logits),
    }


def sharded(rank: int, port: int, folder: str) -> None:
    store = join(rank, port)
    found = {scheme: found_of(scheme) for scheme in SCHEMES}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave(rank, store)


@pytest.mark.full
def test_a_sharded_model_gets_the_certificate_of_its_whole_weights(tmp_path):
    spawn(sharded, args=(free_port(), str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for scheme in SCHEMES:
            model = decoder(scheme)
            proven = certify(model.stack, entry_bound(model, 0.0))
            # Computed in fp64 from the same fp32 numbers.
            assert found[scheme]["curve"] == pytest.approx(proven.curve, rel=1e-9)
            assert found[scheme]["slopes"] == {n: pytest.approx(x, rel=1e-9) for n, x in proven.slopes.items()}
            assert found[scheme]["level"] == "ok"
            assert found[scheme]["kept"]
            assert found[scheme]["notes"] == [
                "no scale test and no Jacobians: weights are shared out over processes; check the model before that"
            ]
            assert found[scheme]["by_role"] == pytest.approx(slopes_by_role(model.stack.layers[0]), rel=1e-9)


def test_plain_weights_are_left_alone():
    model = decoder()
    weight = model.embedding.weight
    assert whole(weight) is weight
    assert local(weight) is weight
    assert not is_sharded(model)
    parameters = list(model.parameters())
    with whole_vectors(model):
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
