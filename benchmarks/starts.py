"""Screens of how training starts: echo and first loss at initialisation, and whether the loss leaves the unigram
entropy within a few hundred steps, by scheme, kind of head, rate and seed.

    python benchmarks/starts.py --data "books/books-train-*.jsonl.xz" --val-data books/books-val.jsonl.xz \
        --tokenizer books/bpe-32768.json.xz --schemes pre post geonorm --heads own tied scaled --out starts.jsonl

Heads: `own` has a matrix of its own; `tied` shares the embedding's; `scaled` shares it and divides the logits by
width × std, so that the logit of the token just read starts at one. Every model is compiled once and then trained for
each rate and seed. Rows that the file holds already are not repeated. `--part 0/2` takes every second model, for
several processes on one GPU: one compiles while another trains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from normlab.bench.facts import dated
from normlab.data import Corpus
from normlab.data.batch_loader import BatchLoader
from normlab.kernels.compiler import cache_autograd_functions
from normlab.models.transformer import Transformer
from normlab.schemes.contract.scales import ConstantScale
from normlab.train import TrainConfig
from normlab.train import optimiser as optimisers
from normlab.train.distributed import clip_grad_norm, initialise, start
from normlab.train.evaluate import evaluate

HeadKind = Literal["own", "tied", "scaled"]

_WINDOW = 20
"""Steps at the end whose mean training loss is judged."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to screen."""

    data: tuple[str, ...] = ("python",)
    val_data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    preset: str = "125m"
    schemes: tuple[str, ...] = ("pre",)
    heads: tuple[HeadKind, ...] = ("own",)
    lrs: tuple[float, ...] = (6e-4, 1.2e-3)
    seeds: int = 1
    steps: int = 200
    warmup: float = 0.2
    """Share of the steps."""
    schedule: Literal["constant", "cosine"] = "constant"
    batch: int = 32
    length: int = 512
    eval_tokens: int = 200_000
    part: str = "0/1"
    minutes: float = 9.0
    """Start no run after so many."""
    out: Path = Path("starts.jsonl")


def main(arguments: Arguments) -> None:
    end = time.monotonic() + 60.0 * arguments.minutes
    known = {_key(row) for row in _rows(arguments.out)}
    cache_autograd_functions()
    for scheme, head in _models(arguments):
        wanted = [
            (lr, seed) for seed in range(arguments.seeds) for lr in arguments.lrs
            if _key({"scheme": scheme, "head": head, "lr": lr, "seed": seed, "steps": arguments.steps}) not in known
        ]  # fmt: skip
        if wanted and time.monotonic() < end:
            Screen(arguments, scheme, head).run(wanted, end)


class Screen:
    """One model, compiled once, trained from several seeds at several rates."""

    def __init__(self, arguments: Arguments, scheme: str, head: HeadKind):
        self.arguments, self.scheme, self.head = arguments, scheme, head
        config = TrainConfig.preset(
            arguments.preset, scheme=scheme, tied=head != "own", data=arguments.data, val_data=arguments.val_data,
            tokenizer=arguments.tokenizer, length=arguments.length, max_length=arguments.length, stream="fp32",
            batch=arguments.batch, tokens=arguments.steps * arguments.batch * arguments.length,
            warmup=arguments.warmup, schedule=arguments.schedule, eval_tokens=arguments.eval_tokens,
        )  # fmt: skip
        self.data: Corpus = config.task_object.open(config, progress=False)
        self.config, self.group = config.for_data(self.data), start()
        self.entropy = config.task_object.guess_loss(config, self.data)
        self.model = self._build()
        self.loss, self.measure = torch.compile(self.model.loss), torch.compile(self.model.cross_entropy)

    def run(self, wanted: list[tuple[float, int]], end: float) -> None:
        for lr, seed in wanted:
            if time.monotonic() > end:
                return
            torch.cuda.empty_cache() if self.group.device.type == "cuda" else None
            _append(self.arguments.out, self._row(replace(self.config, lr=lr, seed=seed)))

    def _build(self) -> Transformer:
        model = initialise(self.config.model.build(device="meta"), self.group, 0)
        if self.head == "scaled":
            width, std = model.config.dim, model.embedding.weight.std().item()
            model.head.accept("logit-scale", ConstantScale(1.0 / (width * std)).to(self.group.device))
        return model

    def _row(self, config: TrainConfig) -> dict[str, Any]:
        began = time.monotonic()
        self.model.init_(generator=torch.Generator(self.group.device).manual_seed(config.seed))
        echo = self._echo()
        losses = self._train(config)
        with self._autocast():
            final = evaluate(self.measure, self.data, config, self.group)["loss"]
        entropy, last = self.entropy, float(np.mean(losses[-_WINDOW:]))
        row = {
            "scheme": self.scheme, "head": self.head, "lr": config.lr, "seed": config.seed, "steps": config.steps,
            "first_loss": losses[0], "read": echo, "train_loss": last, "loss": final, "entropy": entropy,
            "stuck": not last < entropy - 0.1, "curve": [round(x, 3) for x in losses[:: max(1, config.steps // 40)]],
            "params": config.model.num_params(), "seconds": time.monotonic() - began,
            "settings": {name: getattr(config, name) for name in ("batch", "length", "schedule", "warmup")},
            **dated(),
        }  # fmt: skip
        shown = ("scheme", "head", "lr", "seed", "first_loss", "read", "train_loss", "loss", "stuck", "seconds")
        print(*(f"{row[n]:.4g}" if isinstance(row[n], float) else row[n] for n in shown), flush=True)
        return row

    @torch.no_grad()
    def _echo(self) -> float:
        """Mean probability of the token just read, at initialisation."""
        batch = next(self.config.task_object.evaluation(self.config, self.data, batch=2, device=self.group.device))
        probability = self.model(batch.inputs).float().softmax(-1)
        return probability.gather(-1, batch.inputs.unsqueeze(-1)).mean().item()

    def _train(self, config: TrainConfig) -> list[float]:
        optimiser = optimisers.build(self.model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)
        line, losses = config.task_object.line(config, self.data), []
        with BatchLoader(line, batch=config.batch, device=self.group.device) as feed:
            for step in range(config.steps):
                optimisers.set_lr(optimiser, config.rate(step))
                batch = next(feed)
                with self._autocast():
                    loss = self.loss(batch.inputs, batch.targets, z_loss=0.0)
                loss.backward()
                clip_grad_norm(self.model, config.clip)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                self.model.after_step()
                losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def _autocast(self) -> Any:
        return torch.autocast(self.group.device.type, torch.bfloat16)


def _models(arguments: Arguments) -> Iterator[tuple[str, HeadKind]]:
    """The models of this part."""
    index, _, count = arguments.part.partition("/")
    every = [(scheme, head) for head in arguments.heads for scheme in arguments.schemes]
    return iter(every[int(index) :: int(count)])


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("scheme", "head", "lr", "seed", "steps"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
