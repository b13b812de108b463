"""A converted model in other people's trainers: the library's own, and shards over two processes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

import normlab
from normlab import hf
from normlab.data import open_source
from tests.ranks import free_port, join, leave, spawn

from .test_convert_rules import translated
from .zoo import ZOO, answer

STEPS, BATCH, LENGTH = 30, 4, 32


def text() -> torch.Tensor:
    """The built-in text as bytes, cut into sequences."""
    document = next(one.text for one in open_source("python") if len(one.text) > STEPS * BATCH * LENGTH)
    tokens = torch.frombuffer(bytearray(document.encode()[: STEPS * BATCH * LENGTH]), dtype=torch.uint8)
    return tokens.long().view(-1, LENGTH)


class InOrder(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ({"input_ids": tokens, "labels": tokens} for tokens in text())


def test_the_librarys_trainer_trains_it_as_our_decoder_trains(tmp_path):
    model = hf.convert(ZOO["llama"].build(vocab_size=256, tie_word_embeddings=True), "geonorm", init=True).train()
    config = normlab.DecoderConfig(
        scheme=hf.identify(model).scheme, depth=2, dim=32, heads=4, kv_heads=2, hidden=48, vocab_size=256, tied=True
    )
    decoder = normlab.Decoder(config)
    decoder.load_state_dict(translated(model.state_dict(), decoder.state_dict().keys()))
    theirs, ours = losses_of_trainer(model, tmp_path), losses_of_loop(decoder)
    assert theirs[-1] < theirs[0] - 1.0
    # The Trainer of transformers 5.4 divides by all labels, also by the first of a sequence, which nothing predicts.
    scale = next(
        scale for scale in (1.0, (LENGTH - 1) / LENGTH) if theirs[0] == pytest.approx(scale * ours[0], rel=1e-3)
    )
    # Losses are logged with four decimals or more; AdamW divides by gradients that may be mere rounding.
    assert theirs == pytest.approx([scale * loss for loss in ours], abs=5e-3)


def losses_of_trainer(model, folder) -> list[float]:
    optimiser = torch.optim.AdamW(hf.rules(model).param_groups(lr=3e-3, weight_decay=0.1))
    constant = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1, max_grad_norm=0.0,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=InOrder(), optimizers=(optimiser, constant))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_loop(decoder) -> list[float]:
    optimiser = torch.optim.AdamW(decoder.param_groups(lr=3e-3, weight_decay=0.1))
    losses = []
    for tokens in text().split(BATCH):
        loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decoder.after_step()
        losses.append(float(loss.detach()))
    return losses


# -- shards --------------------------------------------------------------------------------------------------------


def train(model, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Three steps on four sequences, shared out over the ranks; every weight."""
    rules = hf.rules(model)
    optimiser = torch.optim.AdamW(rules.param_groups(lr=1e-2, weight_decay=0.1))
    tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
    for _ in range(3):
        logits = answer(model(input_ids=tokens[:, :-1]))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimiser.step()
        rules.after_step()
    weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: weight.detach().clone() for name, weight in weights.items()}


def converted(scheme: str):
    model = hf.convert(ZOO["llama"].build(), scheme, residual_only=scheme == "ngpt")
    hf.rules(model).init_(generator=torch.Generator().manual_seed(7))
    return model


def sharded(rank: int, port: int, scheme: str, results: str) -> None:
    store = join(rank, port)
    model = converted(scheme)
    for layer in model.model.layers:
        fully_shard(layer)
    weights = train(fully_shard(model), rank, 2)
    if rank == 0:
        save_file(weights, results)
    leave(rank, store)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["geonorm", "ngpt"])
@pytest.mark.filterwarnings("ignore::normlab.hf.conversion.convert.FunctionChanges")
def test_two_shards_train_as_one(scheme, tmp_path):
    results = str(tmp_path / "weights.safetensors")
    spawn(sharded, (free_port(), scheme, results), nprocs=2)
    alone, together = train(converted(scheme)), load_file(results)
    assert alone.keys() == together.keys()
    for name, weight in alone.items():
        difference = (together[name] - weight).abs()
        # AdamW's first steps have the size of the rate whatever the gradient: a rounding may turn one round, not many.
        assert float(difference.max()) < 1e-2, name
        assert float(difference.mean()) < 1e-4, name
