"""One process or two: who we are, the same weights from a seed, the same training, the same clipping."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import normlab
from normlab.errors import NormLabError
from normlab.probes.sharded import reshard, whole
from normlab.train import distributed
from normlab.train.distributed import ALONE, Group, clip_grad_norm, initialise, shard, start, stop
from tests.ranks import free_port, spawn

SIZE = {"depth": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "hidden": 48}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SEED = 7
# Plain, one with an entry of its own, one with parameters that have fewer elements than there are ranks.
SCHEMES = ("geonorm", "hybrid", "rezero", "ngpt")


def build(group: Group, scheme: str = "ngpt", **how) -> normlab.Decoder:
    model = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **SIZE), device="meta")
    return initialise(shard(model, group, **how), group, SEED)


def batch(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(group.world)[group.rank]
    return mine[:, :-1], mine[:, 1:]


def weights(model: normlab.Decoder) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def train(model: normlab.Decoder, group: Group) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of three clipped steps on the same global batch."""
    # SGD: a step is as exact as its gradient; Adam would divide rounding noise by itself.
    optimiser = torch.optim.SGD(model.param_groups(lr=0.1))
    losses, norms = [], []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model.loss(*batch(group))
        loss.backward()
        norms.append(clip_grad_norm(model, 0.5).item())
        optimiser.step()
        model.after_step()
        losses.append(group.all_mean(loss.item()))
    return losses, norms


def gradients_of_one_pass(group: Group, **how) -> tuple[float, float]:
    model = build(group, "peri", **how)
    loss = model.loss(*batch(group))
    loss.backward()
    return group.all_mean(loss.item()), clip_grad_norm(model, math.inf).item()


def features_then_head(model: normlab.Decoder, group: Group) -> float:
    """The loss as a loop computes it that never holds all logits: the weight is read outside of the model's call."""
    inputs, targets = batch(group)
    logits = model.head(model.features(inputs), model.embedding.weight)
    return group.all_mean(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())


def norm_with_nan_on_the_last_rank(group: Group) -> dict[str, object]:
    model = build(group, "peri")
    model.loss(*batch(group)).backward()
    before = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    gain = model.stack.layers[0].branches[1].down.weight.grad
    if group.rank == group.world - 1:
        (gain.to_local() if group.world > 1 else gain)[-1, -1] = math.nan
    norm = clip_grad_norm(model, 1e-3)
    after = {name: whole(p.grad) for name, p in model.named_parameters()}
    changed = [name for name, gradient in after.items() if not torch.equal(gradient, before[name])]
    return {"norm": norm.item(), "changed": changed}


def messages(group: Group) -> dict[str, object]:
    def work() -> str:
        if group.rank == 1:
            raise OSError(28, "No space left on device", "/there")
        return "fine"

    try:
        group.together(work)
        refused = ""
    except NormLabError as error:
        refused = str(error)
    text = "grüße" * (1 + 1000 * group.rank)
    return {
        "mean": group.all_mean(1.0 + group.rank),
        "nan": group.all_mean(math.nan if group.rank == 1 else 0.0),
        "any": [group.agree(group.rank == 1), group.agree(False), group.agree(True)],
        "broadcast": group.broadcast({"rank": group.rank, "rate": 0.1 + 0.2}),
        "gather": [len(found) for found in group.gather(text)],
        "refused": refused,
    }


def evaluated_then_looked_at(model: normlab.Decoder, group: Group) -> bool:
    """Whether parameters are shards again after a forward pass that no backward pass followed."""
    with torch.no_grad():
        model.loss(*batch(group))
    reshard(model)
    return all(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def everything(group: Group) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    first = {f"{scheme}/{name}": w for scheme in SCHEMES for name, w in weights(build(group, scheme)).items()}
    model = build(group)
    facts: dict[str, object] = {"features": features_then_head(model, group)}
    facts["shards"] = evaluated_then_looked_at(model, group)
    facts["losses"], facts["norms"] = train(model, group)
    facts["plain"] = gradients_of_one_pass(group)
    facts["checkpointing"] = gradients_of_one_pass(group, checkpointing=True)
    facts["bf16"] = gradients_of_one_pass(group, precision="bf16")
    facts["nan"] = norm_with_nan_on_the_last_rank(group)
    return facts, first


def as_torchrun(rank: int, port: int) -> Group:
    values = (str(rank), "2", str(rank), "127.0.0.1", str(port))
    os.environ.update(dict(zip(TORCHRUN, values, strict=True)))
    torch.set_num_threads(1)
    return start("cpu")


def two(rank: int, port: int, folder: str) -> None:
    group = as_torchrun(rank, port)
    facts, first = everything(group)
    facts["messages"] = messages(group)
    if group.is_main:
        save_file(first, Path(folder, "first.safetensors"))
        Path(folder, "facts.json").write_text(json.dumps(facts))
    stop(group)
    # Without Python's teardown: gloo's threads may still be running, and C++ would abort.
    os._exit(0)


def two_compiled(rank: int, port: int, folder: str) -> None:
    group = as_torchrun(rank, port)
    facts = [gradients_of_one_pass(group), gradients_of_one_pass(group, compile=True)]
    facts.append(gradients_of_one_pass(group, compile=True, checkpointing=True))
    if group.is_main:
        Path(folder, "facts.json").write_text(json.dumps(facts))
    stop(group)
    os._exit(0)


@pytest.mark.full
def test_compiled_layers_are_the_same_layers(tmp_path):
    spawn(two_compiled, args=(free_port(), str(tmp_path)), nprocs=2)
    plain, compiled, recomputed = json.loads((tmp_path / "facts.json").read_text())
    # The compiler fuses and reorders: a few roundings a layer.
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert recomputed == pytest.approx(plain, rel=1e-5)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    spawn(two, args=(free_port(), str(folder)), nprocs=2)
    return json.loads((folder / "facts.json").read_text()), load_file(folder / "first.safetensors")


@pytest.fixture(scope="module")
def of_one():
    return everything(ALONE)


def test_a_seed_gives_the_same_weights_bit_for_bit(of_two, of_one):
    assert of_two[1].keys() == of_one[1].keys()
    for name, weight in of_one[1].items():
        if name.startswith("ngpt/"):
            # Its constraint divides by a length, which two ranks sum in two halves.
            assert torch.allclose(of_two[1][name], weight, rtol=4 * torch.finfo(weight.dtype).eps, atol=0), name
        else:
            assert torch.equal(of_two[1][name], weight), name


@pytest.mark.parametrize("what", ["losses", "norms", "plain", "checkpointing", "features"])
def test_two_processes_train_as_one(of_two, of_one, what):
    # Means over 32 tokens in two halves: a few roundings (1.2e-7) each, carried through three steps.
    assert of_two[0][what] == pytest.approx(of_one[0][what], rel=5e-6)


def test_checkpointing_changes_nothing(of_two):
    assert of_two[0]["checkpointing"] == of_two[0]["plain"]


def test_bf16_is_close_and_not_the_same(of_two):
    # Weights and products with 8 bits: 2^-8 a rounding, averaging out over tokens and growing with a few layers.
    assert of_two[0]["bf16"] == pytest.approx(of_two[0]["plain"], rel=4 * 2**-8)
    assert of_two[0]["bf16"] != of_two[0]["plain"]


def test_a_norm_that_is_not_finite_changes_no_gradient_but_where_it_was(of_two, of_one):
    for facts, _ in (of_two, of_one):
        assert math.isnan(facts["nan"]["norm"])
        assert facts["nan"]["changed"] == ["stack.layers.0.branches.1.down.weight"]


def test_parameters_are_shards_again_after_an_evaluation(of_two):
    assert of_two[0]["shards"]


def test_what_ranks_tell_each_other(of_two):
    found = of_two[0]["messages"]
    assert found["mean"] == 1.5
    assert math.isnan(found["nan"])
    assert found["any"] == [True, False, True]
    assert found["broadcast"] == {"rank": 0, "rate": 0.1 + 0.2}
    assert found["gather"] == [5, 5005]
    assert found["refused"].startswith("cannot use /there: No space left on device; free some space")


def test_alone_every_message_is_the_identity():
    found = messages(ALONE)
    assert found["mean"] == 1.0
    assert found["any"] == [False, False, True]
    assert found["broadcast"] == {"rank": 0, "rate": 0.1 + 0.2}
    assert found["gather"] == [5]
    assert ALONE.together(lambda: 3) == [3]
    with pytest.raises(NormLabError, match="RuntimeError"):
        ALONE.together(lambda: (_ for _ in ()).throw(RuntimeError()))


@pytest.fixture
def no_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_alone_there_is_no_process_group(no_torchrun):
    group = start("cpu")
    assert group == ALONE
    assert group.is_main
    assert not torch.distributed.is_initialized()
    stop(group)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT; start the processes with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two': expected a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1': expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2 do not fit"),
        ({"WORLD_SIZE": "0"}, "do not fit"),
    ],
)
def test_an_environment_that_makes_no_sense(no_torchrun, environment, complaint):
    for name, value in environment.items():
        no_torchrun.setenv(name, value)
    with pytest.raises(NormLabError, match=complaint):
        start("cpu")


def test_devices(no_torchrun):
    with pytest.raises(NormLabError, match="unknown device 'gpu'"):
        start("gpu")
    no_torchrun.setattr(torch.cuda, "is_available", lambda: False)
    assert start("auto").device.type == "cpu"
    with pytest.raises(NormLabError, match="no GPU here; try --device cpu"):
        start("cuda")


def test_every_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pick = distributed.pick_device
    assert [pick("auto", rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert pick("cuda:1", 0, 1) == torch.device("cuda", 1)
    with pytest.raises(NormLabError, match="GPU 2 does not exist, there are 2"):
        pick("cuda", 2, 3)
    with pytest.raises(NormLabError, match="takes the GPU of its local rank"):
        pick("cuda:1", 0, 2)


def test_unknown_precision():
    model = normlab.Decoder(normlab.DecoderConfig(scheme="pre", **SIZE), device="meta")
    with pytest.raises(NormLabError, match="unknown precision 'fp8'"):
        shard(model, ALONE, precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 1e6])
def test_clipping_is_that_of_torch(scale):
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a) * scale
        b.grad = a.grad.clone()
    norm = clip_grad_norm(ours, 0.25)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_scales_nothing(bad):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[bad, 3.0]])
    assert not clip_grad_norm(model, 1.0).isfinite()
    assert model.weight.grad[0, 1] == 3.0


def test_a_model_without_gradients():
    assert clip_grad_norm(torch.nn.Linear(2, 1), 1.0) == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bound_that_is_none(bad):
    with pytest.raises(NormLabError, match="max_norm must be positive"):
        clip_grad_norm(torch.nn.Linear(2, 1), bad)
