"""Hugging Face's Trainer on the built-in text: it learns, with the scheme's groups and under its constraint."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from normlab import NormLabError
from normlab.data import open_source
from normlab.data.tokenizer import Bytes
from normlab.hf import NormLabCallback, NormLabConfig, NormLabForCausalLM, optimizer_cls_and_kwargs
from tests.matrix import parametrize

LENGTH, STEPS = 64, 30
SIZES = {"depth": 2, "dim": 32, "heads": 2, "vocab_size": 320, "max_length": LENGTH}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, torch.Tensor]]:
    """The beginning of the built-in text, cut into sequences."""
    words = Bytes()
    documents = islice(open_source("python"), 20)
    ids = np.concatenate([[*words.encode(document.text), words.end] for document in documents])[: 400 * LENGTH]
    cut = torch.from_numpy(ids.astype(np.int64)).unfold(0, LENGTH, LENGTH)
    return [{"input_ids": row, "labels": row} for row in cut]


def model_of(scheme: str, **changes) -> NormLabForCausalLM:
    torch.manual_seed(0)
    return NormLabForCausalLM(NormLabConfig(model={**SIZES, "scheme": scheme, **changes}))


def arguments(folder, **changes) -> TrainingArguments:
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "weight_decay": 0.1,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


def trainer_of(model, rows, folder, *, callbacks=(NormLabCallback,), **changes) -> Trainer:
    args = arguments(folder, **changes)
    return Trainer(
        model,
        args,
        train_dataset=rows,
        callbacks=[kind() if isinstance(kind, type) else kind for kind in callbacks],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, args),
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Norms(TrainerCallback):
    """How far the rows of nGPT's matrices are from unit length, after every step."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    @torch.no_grad()
    def on_step_end(self, args, state, control, *, model, **kwargs) -> None:
        sizes = [role.view().norm(dim=role.model_axis) for role in model.decoder.find_roles() if role.is_matrix]
        self.errors.append(max(float((size - 1).abs().max()) for size in sizes))


@parametrize("scheme", ["geonorm", "ngpt"], quick=["ngpt"])
def test_it_learns(scheme, rows, tmp_path):
    trainer = trainer_of(model_of(scheme), rows, tmp_path)
    trainer.train()
    seen = losses(trainer)
    assert len(seen) == STEPS
    # Knowing which bytes occur at all, about 90 of the vocabulary's 320, is worth ln(320/90) nats.
    assert abs(seen[0] - np.log(320)) < 0.5
    assert np.mean(seen[-5:]) < np.log(90)


def test_the_constraint_holds_after_every_step(rows, tmp_path):
    held, loose = Norms(), Norms()
    trainer_of(model_of("ngpt"), rows, tmp_path, callbacks=[NormLabCallback, held], max_steps=5).train()
    trainer_of(model_of("ngpt"), rows, tmp_path, callbacks=[loose], max_steps=5).train()
    # A sum of 32 squares, a root and a division.
    assert len(held.errors) == 5
    assert max(held.errors) < 8 * torch.finfo(torch.float32).eps
    assert min(loose.errors) > 1e-3


def test_the_optimiser_gets_the_schemes_groups(rows, tmp_path):
    model = model_of("peri", bias=True)
    optimiser = trainer_of(model, rows, tmp_path, learning_rate=0.5).create_optimizer()
    expected = model.param_groups(lr=0.5, weight_decay=0.1)
    assert isinstance(optimiser, torch.optim.AdamW)
    assert len(optimiser.param_groups) == len(expected) == 2
    for found, group in zip(optimiser.param_groups, expected, strict=True):
        assert (found["name"], found["weight_decay"], found["lr"]) == (group["name"], group["weight_decay"], 0.5)
        assert [id(p) for p in found["params"]] == [id(p) for p in group["params"]]
        assert found["betas"] == (0.9, 0.999)


def test_rates_carried_to_another_width_reach_the_optimiser(rows, tmp_path):
    model = NormLabForCausalLM(NormLabConfig(model={**SIZES, "scheme": "peri"}, base_dim=8))
    optimiser = trainer_of(model, rows, tmp_path, learning_rate=0.4).create_optimizer()
    assert {round(group["lr"], 9) for group in optimiser.param_groups} == {0.1, 0.4}


def test_an_optimiser_with_groups_of_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", lambda *_: (torch.optim.AdamW, {"params": []}))
    with pytest.raises(NormLabError, match="makes parameter groups of its own"):
        optimizer_cls_and_kwargs(model_of("pre"), arguments(tmp_path))


class TwoMethods(torch.nn.Module):
    """A model with nothing of NormLab's but what the guide asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.steps = torch.nn.Embedding(320, 320), 0

    def forward(self, input_ids, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}

    def param_groups(self, *, lr, weight_decay=0.0):
        return [{"params": [self.table.weight], "lr": lr, "weight_decay": 7 * weight_decay}]

    def after_step(self) -> None:
        self.steps += 1


def test_two_methods_are_enough(rows, tmp_path):
    trainer = trainer_of(TwoMethods(), rows, tmp_path, max_steps=3)
    trainer.train()
    assert trainer.model.steps == 3
    assert trainer.optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.7)


def test_a_model_without_a_scheme_is_refused(tmp_path):
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    with pytest.raises(NormLabError, match="LlamaForCausalLM follows no scheme; convert it first"):
        optimizer_cls_and_kwargs(LlamaForCausalLM(LlamaConfig(**sizes)), arguments(tmp_path))


@pytest.mark.full
def test_it_is_saved_and_resumed(rows, tmp_path):
    straight = trainer_of(model_of("ngpt"), rows, tmp_path / "one", max_steps=6)
    straight.train()
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    trainer_of(model_of("ngpt"), rows, tmp_path / "two", **options).train()
    resumed = trainer_of(model_of("ngpt"), rows, tmp_path / "two", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-6")
    x = rows[0]["input_ids"].unsqueeze(0)
    assert torch.equal(loaded.eval()(x).logits, straight.model.eval()(x).logits)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [{"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
    ids=["checkpointing", "accumulated"],
)
def test_the_same_steps_in_less_memory(changes, rows, tmp_path):
    plain = trainer_of(model_of("geonorm"), rows, tmp_path, max_steps=4)
    other = trainer_of(model_of("geonorm"), rows, tmp_path, max_steps=4, **changes)
    plain.train()
    other.train()
    assert losses(other) == pytest.approx(losses(plain), rel=1e-3)


def test_bf16(rows, tmp_path):
    trainer = trainer_of(model_of("geonorm"), rows, tmp_path, max_steps=10, bf16=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 1
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
