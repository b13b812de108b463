"""Why does a gap between schemes change with the sequence length? Long sequences, short ones, and long ones cut up.

    python benchmarks/lengths.py --schemes pre geonorm --short 128 --long 1024 --seeds 3 --out lengths.json

All runs have the same number of tokens a step. `short` and `long` draw their own sequences. `cut` trains and is
evaluated on short sequences, but a batch is made of the long ones: the same texts in the same order, so that its tokens
come from as few places. A gap that is the same for `cut` and `long` is due to what a batch is made of; one that is the
same for `cut` and `short` is due to what attention sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from normlab.bench.facts import dated
from normlab.data import Corpus
from normlab.data.batch_loader import BatchLoader
from normlab.errors import NormLabError
from normlab.models import DecoderConfig
from normlab.models.transformer import Transformer
from normlab.probes.copying import copy_losses
from normlab.train import optimiser as optimisers
from normlab.train.distributed import clip_grad_norm, pick_device
from normlab.train.model_cache import BuiltModel, compiled, reinitialise
from normlab.train.tasks.language import LanguageTrainConfig
from normlab.utils.files import write_json

Treatment = Literal["short", "long", "cut"]
Tokens = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to train."""

    schemes: tuple[str, ...] = ("pre", "geonorm")
    treatments: tuple[Treatment, ...] = ("short", "long", "cut")
    short: int = 128
    long: int = 1024
    tokens_a_step: int = 4096
    steps: int = 500
    lrs: tuple[float, ...] = (4e-3,)
    seeds: int = 3
    depth: int = 4
    dim: int = 64
    heads: int = 2
    data: tuple[str, ...] = ("python",)
    val_data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    eval_tokens: int = 200_000
    device: str = "cpu"
    out: Path = Path("lengths.json")


def main(arguments: Arguments) -> None:
    _check(arguments)
    rows: list[dict[str, Any]] = []
    built: dict[str, BuiltModel] = {}
    for treatment in arguments.treatments:
        config = _config(arguments, arguments.short if treatment == "short" else arguments.long)
        data: Corpus = config.task_object.open(config, progress=False)
        for lr in arguments.lrs:
            for seed in range(arguments.seeds):
                for scheme in arguments.schemes:
                    run = replace(config.for_data(data), seed=seed, lr=lr)
                    run = replace(run, model=replace(run.model, scheme=scheme))
                    length = arguments.long if treatment == "long" else arguments.short
                    rows.append({"treatment": treatment, "scheme": scheme, "lr": lr, "seed": seed, "length": length})
                    if scheme not in built:
                        built[scheme] = _built(run)
                    rows[-1] |= _train(run, data, length, built[scheme])
                    print(*(f"{name} {value}" for name, value in rows[-1].items()), sep=", ", flush=True)
                    write_json(arguments.out, {**dated(), "arguments": _plain(arguments), "rows": rows})


def _check(arguments: Arguments) -> None:
    """Raise for what would fail, or compare different things, only after some runs have been trained."""
    short, long, step = arguments.short, arguments.long, arguments.tokens_a_step
    if not 4 <= short < long or long % short or step % long:
        raise NormLabError(
            f"short must be 4 or more and divide long, and long tokens_a_step, so that all steps have the same tokens; "
            f"got {short}, {long} and {step}; try 128, 1024 and 4096"
        )
    if arguments.eval_tokens < step:
        raise NormLabError(f"eval_tokens must be a whole step, {step}, or more, got {arguments.eval_tokens}")
    if not os.access(arguments.out.absolute().parent, os.W_OK):
        raise NormLabError(f"cannot write {arguments.out}: its folder is missing or read-only; choose another --out")
    pick_device(arguments.device)
    for treatment in arguments.treatments:
        config = _config(arguments, short if treatment == "short" else long)
        for model in config.model.with_schemes(arguments.schemes):
            model.check_start()
        config.task_object.check_sources(config)


def _config(arguments: Arguments, length: int) -> LanguageTrainConfig:
    """A run on sequences of this length, in as many tokens a step as all others."""
    model = DecoderConfig(
        depth=arguments.depth, dim=arguments.dim, heads=arguments.heads, max_length=arguments.long, stream="fp32"
    )
    return LanguageTrainConfig(
        model=model, data=arguments.data, val_data=arguments.val_data, tokenizer=arguments.tokenizer, length=length,
        batch=arguments.tokens_a_step // length, tokens=arguments.steps * arguments.tokens_a_step, warmup=0.1,
        eval_tokens=arguments.eval_tokens, device=arguments.device,
    )  # fmt: skip


def _built(config: LanguageTrainConfig) -> BuiltModel:
    """One model for all runs of a scheme, so that it is compiled once for each length."""
    model = config.model.build(device=config.device)
    return BuiltModel(model, compiled(model.loss) if config.device == "cuda" else model.loss, model.cross_entropy)


def _train(config: LanguageTrainConfig, data: Corpus, length: int, built: BuiltModel) -> dict[str, Any]:
    device = torch.device(config.device)
    model = reinitialise(built.model, device, config.seed)
    optimiser = optimisers.build(model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)
    with BatchLoader(config.task_object.line(config, data), batch=config.batch, device=device) as feed:
        for step in range(config.steps):
            optimisers.set_lr(optimiser, config.rate(step))
            batch = next(feed)
            with _autocast(config):
                built.loss(*_cut(batch.inputs, batch.targets, length)).backward()
            clip_grad_norm(model, config.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            model.after_step()
    return _result(model, config, data, length)


def _result(model: Transformer, config: LanguageTrainConfig, data: Corpus, length: int) -> dict[str, Any]:
    """Validation loss on sequences of the trained length, by quarters of the position, and losses of copies."""
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    batches = list(_evaluation(config, data, length))
    with torch.no_grad(), _autocast(config):
        for inputs, targets in batches:
            losses = [model.cross_entropy(inputs, _only(targets, quarter)) for quarter in range(4)]
            sums, count = sums + torch.stack(losses).double().cpu(), count + 1
        copies = copy_losses(model, batches[0][0])
    quarters = [round(float(value) / count, 4) for value in sums]
    return {"loss": round(sum(quarters) / 4, 4), "quarters": quarters, "copies": copies and list(copies)}


def _evaluation(config: LanguageTrainConfig, data: Corpus, length: int) -> Iterator[Tokens]:
    """Whole batches alone: the last sequence of the validation text is shorter."""
    for batch in config.task_object.evaluation(config, data, batch=config.batch, device=torch.device(config.device)):
        if batch.inputs.shape == (config.batch, config.length) and bool((batch.targets >= 0).all()):
            yield _cut(batch.inputs, batch.targets, length)


def _cut(inputs: torch.Tensor, targets: torch.Tensor, length: int) -> Tokens:
    return inputs.reshape(-1, length), targets.reshape(-1, length)


def _only(targets: torch.Tensor, quarter: int) -> torch.Tensor:
    """The targets of one quarter of the positions; the others are ignored."""
    kept = torch.full_like(targets, -100)
    size = targets.shape[1] // 4
    kept[:, quarter * size : (quarter + 1) * size] = targets[:, quarter * size : (quarter + 1) * size]
    return kept


def _autocast(config: LanguageTrainConfig) -> torch.autocast:
    return torch.autocast(config.device, torch.bfloat16, enabled=config.device == "cuda")


def _plain(arguments: Arguments) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments, description=__doc__))
    except NormLabError as error:
        print(f"lengths: {error}", file=sys.stderr)
        sys.exit(2)
