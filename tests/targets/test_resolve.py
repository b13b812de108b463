"""Targets by name: what a text is taken for, the schemes' common set-up, and one line for what is no target."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import normlab
from normlab import NormLabError
from normlab.models.decoder import Decoder
from normlab.norms import rms
from normlab.roles import xavier_std
from normlab.targets import resolve
from normlab.targets.scheme import heads_for

SMALL = {"depth": 3, "width": 32, "length": 8, "batch_size": 2}


def decoder(target, **size) -> Decoder:
    model = target.build(**size)
    assert isinstance(model, Decoder)
    return model


# -- schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_every_scheme_builds_runs_and_steps(name):
    target = resolve(name, **SMALL)
    assert (target.kind, target.name, str(target.scheme)) == ("scheme", name, name)
    model = decoder(target, depth=2)
    batches = target.batches()
    optimiser = torch.optim.AdamW(target.param_groups(model, lr=1e-2, weight_decay=0.1))
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = target.loss(model, next(batches))
        loss.backward()
        optimiser.step()
        target.after_step(model)
        losses.append(loss.item())
    assert len(model.stack.layers) == 2
    assert all(map(math.isfinite, losses))
    if model.stack.bound.constrains:
        before = model.embedding.weight.clone()
        model.after_step()
        torch.testing.assert_close(model.embedding.weight, before)


def test_the_common_start_is_xavier_under_the_schemes_own_rules():
    model = decoder(resolve("pre", width=64), depth=4)
    shares = {"o": 1 / math.sqrt(8), "down": 1 / math.sqrt(8)}
    for role in model.find_roles():
        if role.is_matrix:
            wished = {"embed": 1.12, "head": 1 / math.sqrt(3 * 64)}.get(role.role)
            wished = wished or xavier_std(role, 1.0) * shares.get(role.role, 1.0)
            n = role.view().numel()
            # The standard deviation of n normal numbers varies by 1/√(2n) of itself; five of that.
            assert role.view().std() == pytest.approx(wished, rel=5 / math.sqrt(2 * n)), role.name
    deep = decoder(resolve("deepnorm", width=64), depth=4)
    values = next(role for role in deep.find_roles() if role.role == "v")
    assert values.view().std() == pytest.approx(xavier_std(values, 1.0) * (8 * 4) ** -0.25, rel=0.06)


def test_the_first_state_and_the_first_loss_are_those_of_the_set_up():
    target = resolve("pre")
    model = decoder(target, depth=2)
    batch = next(target.batches())
    assert rms(model.embedding(batch[0])).mean().item() == pytest.approx(1.12, rel=5 / math.sqrt(2 * 64 * 64))
    # Logits of variance 1/3 cost half of that above the entropy of a guess.
    assert target.loss(model, batch).item() == pytest.approx(math.log(64) + 1 / 6, abs=0.15)
    assert (target.depth, target.width, batch[0].shape) == (48, 64, (8, 48))


def test_a_seed_means_the_same_model_and_disturbs_nobody():
    target = resolve("peri", **SMALL)
    before = torch.random.get_rng_state()
    one, same, other = (target.build(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    for a, b in zip(next(target.batches(1)), next(resolve("pre", **SMALL).batches(1)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_in_half_precision_parameters_in_fp32(dtype):
    target, whole = resolve("pre", dtype=dtype, **SMALL), resolve("pre", **SMALL)
    model, batch = target.build(), next(target.batches())
    loss = target.loss(model, batch)
    loss.backward()
    # Eight bits of mantissa, or eleven, in a handful of products.
    assert loss.item() == pytest.approx(whole.loss(model, batch).item(), rel=2**-6)
    assert loss.item() != whole.loss(model, batch).item()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_residual_step_can_be_changed_where_there_is_one():
    target = resolve("peri", **SMALL)
    slow = target.with_step(0.1)
    assert slow is not None
    assert slow.name == "peri(step=0.1)"
    assert str(decoder(slow).stack.scheme) == "peri(step=0.1)"
    assert str(decoder(target).stack.scheme) == "peri"
    assert resolve("post", **SMALL).with_step(0.1) is None


def test_the_twin_is_pre_norm_of_the_same_size():
    twin = resolve("post", vocabulary=16, dtype="bf16", **SMALL).twin()
    assert twin is not None
    assert (twin.name, twin.depth, twin.width, twin.dtype) == ("pre", 3, 32, "bf16")
    inputs, _ = next(twin.batches())
    assert inputs.shape == (2, 8)
    assert inputs.max() < 16


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (128, 8), (8, 1), (50, 1), (96, 6), (2, 1)])
def test_heads_divide_the_width_and_are_even(width, heads):
    assert heads_for(width) == heads
    assert width % heads == 0
    assert width // heads % 2 == 0


def test_data_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    for data, vocabulary in [("random", 64), ("bigram", 64), (str(tmp_path / "text.txt"), 257)]:
        target = resolve("pre", data=data, **SMALL)
        model = decoder(target)
        assert model.config.vocab_size == vocabulary
        assert target.loss(model, next(target.batches())).isfinite()
        assert target.unigram is not None


def test_a_name_that_could_be_a_models_says_what_it_was_taken_for():
    (note,) = resolve("gpt2", **SMALL).notes
    assert note.startswith("gpt2 is taken as the scheme pre; a Hugging Face model has its owner before its name")
    assert resolve("peri(step=0.5)", **SMALL).notes == resolve(normlab.scheme("peri"), **SMALL).notes == ()


# -- what is no target -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "match"),
    [
        ("peir", {}, "unknown target 'peir'; did you mean 'peri'"),
        ("wibble(step=1)", {}, "unknown target 'wibble'"),
        ("peri(stpe=0.1)", {}, "unknown option of peri 'stpe'; did you mean 'step'"),
        ("peri(step=", {}, "unknown target 'peri'|cannot read scheme"),
        ("./nothing", {}, "./nothing does not exist; check the path"),
        ("nothing/config.json", {}, "does not exist; check the path"),
        (Path("nothing"), {}, "nothing does not exist"),
        (3.5, {}, "cannot check a float; expected a scheme"),
        ("pre", {"depth": 0}, "depth must be at least 1, got 0"),
        ("pre", {"width": 33}, "width must be even, got 33; try 34"),
        ("pre", {"shrink": 4}, "shrink is for Hugging Face models, not for a scheme target"),
        ("pre", {"blocks": "layers.*"}, "blocks are found in a scheme target; leave the pattern out"),
        ("pre", {"weights": True}, "weights are for Hugging Face models and runs"),
        ("pre", {"batch": 1}, "batch and loss_fn are for modules and factories"),
        ("pre", {"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ("pre", {"device": "abacus"}, "device 'abacus' cannot be used"),
        ("pre", {"device": "meta"}, "device 'meta' cannot be used"),
    ],
)
def test_one_line_for_what_is_no_target(target, options, match):
    with pytest.raises(NormLabError, match=match) as error:
        resolve(target, **options)
    assert "\n" not in str(error.value)


def test_files_and_folders_that_are_no_target(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    for name, match in [
        ("notes.txt", "is not a target; expected a scheme"),
        ("torn.json", "is torn or is not JSON"),
        ("other.json", "names no model_type"),
        ("empty", r"has no config\.json; expected the folder of a run"),
    ]:
        with pytest.raises(NormLabError, match=match):
            resolve(tmp_path / name)


def test_sizes_that_cannot_be_built():
    target = resolve("pre", **SMALL)
    with pytest.raises(NormLabError, match="depth must be at least 1, got 0"):
        target.build(depth=0)
