"""Live modules: taken as they are, run on what they read, refused in one line."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normlab
import normlab.hf
from normlab import Decoder, DecoderConfig, NormLabError
from normlab.probes.probe import measure
from normlab.targets import resolve
from tests.targets.own_models import SMALL, Block, Reader, Tower, runs
from tests.targets.tiny import batch_for, hugging_face


def test_a_module_is_itself_with_its_batch():
    model, batch = Tower(), torch.randn(2, 5, 8)
    target = resolve(model, batch=batch, loss_fn=lambda m, b: m(b).square().mean())
    assert (target.kind, target.name, target.depth, target.resizable) == ("module", "Tower", 3, frozenset())
    assert target.build(depth=3, seed=1) is model
    assert next(target.batches(1)) is batch
    assert target.loss(model, batch).item() == pytest.approx(model(batch).square().mean().item())
    assert target.unigram is None
    assert target.twin() is None
    with pytest.raises(NormLabError, match="Tower: its depth is 3 and cannot be changed; leave out depth 6"):
        target.build(depth=6)


def test_a_published_model_answers_with_its_own_loss():
    model, batch = hugging_face("llama"), batch_for("llama")
    target = resolve(model, batch=batch)
    assert (target.depth, target.width) == (3, 32)
    assert runs(target) == pytest.approx(model(**batch).loss.item())
    assert measure(model, batch, target.loss).depth == 3


def test_a_converted_model_is_trained_by_the_rules_of_its_scheme():
    model = normlab.hf.convert(hugging_face("llama"), "ngpt", init=True, residual_only=True)
    target = resolve(model, batch=batch_for("llama"))
    assert all(group["weight_decay"] == 0.0 for group in target.param_groups(model, 1e-3, 0.1))
    rows = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        rows.mul_(2.0)
    target.after_step(model)
    # A norm of 32 squares: log2(32)/4 + 2 roundings, and those of the division and of this one.
    assert torch.allclose(rows.norm(dim=-1), torch.ones(len(rows)), rtol=0, atol=8 * torch.finfo(torch.float32).eps)
    rates = {
        group["lr"] for group in target.param_groups(normlab.hf.convert(hugging_face("llama"), "lambdas"), 1e-3, 0)
    }
    assert rates == {1e-3, 0.1}


@pytest.mark.parametrize(
    ("build", "task"),
    [
        (Tower, "States"),
        (Reader, "Logits"),
        (lambda: Reader(head=False), "States"),
        (lambda: hugging_face("gpt2"), "Logits"),
    ],
    ids=["tower", "reader", "headless", "gpt2"],
)
def test_a_batch_is_guessed_from_what_the_module_reads(build, task):
    target = resolve(build(), length=48, batch_size=8)
    assert type(target.task).__name__ == task
    # Logits of RMS s cost s²/2 above a guess; the answers' RMS is at most about 1.5 here.
    assert runs(target) == pytest.approx(math.log(target.task.data.vocabulary), abs=1.25)


def test_guessing_leaves_the_module_as_it_was():
    model = Reader()
    model.head = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 64))
    model.forward = lambda ids: model.head(model.embedding(ids).flatten(0, 1)).unflatten(0, ids.shape)
    state, seen = torch.random.get_rng_state(), model.head[1].running_mean.clone()
    target = resolve(model.train(), **SMALL)
    assert type(target.task).__name__ == "Logits"
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(seen, model.head[1].running_mean)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_decoder_brings_its_scheme_and_its_rules():
    model = Decoder(DecoderConfig(scheme="ngpt", depth=2, dim=16, heads=2, vocab_size=32, max_length=6))
    target = resolve(model, **SMALL)
    assert str(target.scheme) == "ngpt"
    assert target.width == 16
    assert next(target.batches())[0].shape == (2, 6)
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    target.after_step(model)
    torch.testing.assert_close(model.embedding.weight.norm(dim=-1), torch.ones(32))
    assert all(group["weight_decay"] == 0.0 for group in target.param_groups(model, 1e-3, 0.1))


def test_a_stack_in_somebodys_model_keeps_its_rules():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            from normlab.models.attention import Attention
            from normlab.models.mlp import MLP

            self.embedding = nn.Embedding(64, 16)
            self.stack = normlab.Stack("deepnorm", [(Attention(16, 2), MLP(16, 32)) for _ in range(2)], dim=16).init_()

        def forward(self, ids):
            return self.stack(self.embedding(ids))

    model = Theirs()
    model.embedding.weight.requires_grad_(False)
    target = resolve(model, **SMALL)
    assert str(target.scheme) == "deepnorm"
    groups = target.param_groups(model, 1e-3, 0.1)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.stack.parameters()))
    assert math.isfinite(runs(target))


def test_few_of_many_tokens_are_worth_a_note():
    assert resolve(Reader(rows=64), **SMALL).notes == ()
    (note,) = resolve(Reader(rows=512), **SMALL).notes
    assert note.startswith("64 of 512 tokens occur in the data")


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))


class Elsewhere(Reader):
    def forward(self, ids):
        return super().forward(ids)["logits"].mean(1)


class Broken(Reader):
    def forward(self, ids):
        raise RuntimeError("the first line\nand a second")


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (nn.Linear(4, 4), {}, "Linear has no repeated blocks"),
        (nn.Identity(), {}, "Identity has no parameters; expected a Transformer"),
        (Pixels(), {}, "Pixels: cannot tell what to run it on.* begins with a Conv2d; pass batch="),
        (Elsewhere(), {}, r"Elsewhere: returned \(2, 64\) for token ids \(2, 8\); pass batch="),
        (Broken(), {}, r"Broken: cannot be run on token ids .*\(RuntimeError: the first line\); pass batch="),
        (Tower(), {"loss_fn": lambda m, b: m(b).sum()}, "loss_fn came without a batch"),
        (Tower(), {"blocks": "towers.*"}, "no block of Tower matches"),
    ],
    ids=["no blocks", "no parameters", "pixels", "pooled", "raises", "no batch", "pattern"],
)
def test_one_line_for_a_module_that_is_no_target(model, options, match):
    with pytest.raises(NormLabError, match=match) as error:
        resolve(model, **SMALL, **options)
    assert "\n" not in str(error.value)
