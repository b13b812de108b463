"""Why does a run get stuck at a high rate, where all tokens point the same way? The same runs with five treatments.

    python benchmarks/collapse.py --schemes post --lr 3.2e-2 --seeds 3 --out collapse.json

Treatments: `none`; `apart` adds to the loss a penalty on the cosine of two tokens after every block; `bounded` divides
what a sublayer returns by its RMS, so that no update outgrows the state; `attention` and `mlp` do not train the
matrices of that sublayer. A run that is stuck without a treatment and trains with one had its cause there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import tyro
from torch import nn

from normlab.bench.facts import dated
from normlab.data import Batch, Corpus
from normlab.data.batch_loader import BatchLoader
from normlab.models import DecoderConfig
from normlab.models.transformer import Transformer
from normlab.train import TrainConfig
from normlab.train import optimiser as optimisers
from normlab.train.distributed import clip_grad_norm
from normlab.train.monitor.profile import profile
from normlab.train.tasks.language import LanguageTrainConfig
from normlab.utils.files import write_json

Treatment = Literal["none", "apart", "bounded", "attention", "mlp"]

_SUBLAYERS = {"attention": ".branches.0.", "mlp": ".branches.1."}
_WINDOW = 50
"""Steps at the end whose mean training loss is judged."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to train."""

    schemes: tuple[str, ...] = ("post",)
    treatments: tuple[Treatment, ...] = ("none", "apart", "bounded", "attention", "mlp")
    lr: float = 3.2e-2
    seeds: int = 3
    depth: int = 6
    dim: int = 64
    steps: int = 400
    data: tuple[str, ...] = ("python",)
    penalty: float = 3.0
    """Weight of the mean squared cosine in the loss."""
    out: Path = Path("collapse.json")


def main(arguments: Arguments) -> None:
    config = LanguageTrainConfig(
        model=DecoderConfig(depth=arguments.depth, dim=arguments.dim, heads=4, max_length=128), data=arguments.data,
        length=128, batch=16, tokens=arguments.steps * 16 * 128, lr=arguments.lr, warmup=0.2, device="cpu",
    )  # fmt: skip
    data: Corpus = config.task_object.open(config, progress=False)
    config, rows = config.for_data(data), []
    for seed in range(arguments.seeds):
        for scheme in arguments.schemes:
            for treatment in arguments.treatments:
                run = replace(config, seed=seed, model=replace(config.model, scheme=scheme))
                rows.append({"scheme": scheme, "treatment": treatment, "seed": seed, "lr": arguments.lr})
                rows[-1] |= _train(run, data, treatment, arguments.penalty)
                print(*(f"{name} {value}" for name, value in rows[-1].items()), sep=", ", flush=True)
                write_json(arguments.out, {**dated(), "rows": rows})


class Bounded(nn.Module):
    """A sublayer whose output is divided by its RMS."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch = branch

    def forward(self, state: torch.Tensor, **options: Any) -> torch.Tensor:
        return nn.functional.rms_norm(self.branch(state, **options), state.shape[-1:])


def _train(config: TrainConfig, data: Corpus, treatment: Treatment, penalty: float) -> dict[str, Any]:
    model = config.model.build()
    model.init_(generator=torch.Generator().manual_seed(config.seed))
    if treatment == "bounded":
        for branches in _branches(model):
            for place, branch in enumerate(branches):
                branches[place] = Bounded(branch)
    for name, weight in model.named_parameters():
        weight.requires_grad_(_SUBLAYERS.get(treatment, "\0") not in name)
    optimiser = optimisers.build(model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)
    entropy, losses = config.task_object.guess_loss(config, data), []
    with BatchLoader(config.task_object.line(config, data), batch=config.batch) as feed:
        for step in range(config.steps):
            optimisers.set_lr(optimiser, config.rate(step))
            losses.append(_gradient(model, next(feed), penalty if treatment == "apart" else 0.0))
            clip_grad_norm(model, config.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            model.after_step()
        return _result(model, next(feed), sum(losses[-_WINDOW:]) / _WINDOW, entropy)


def _result(model: Transformer, batch: Batch, loss: float, entropy: float) -> dict[str, Any]:
    few = batch.inputs[:4], batch.targets[:4]
    with _outputs(branch for branches in _branches(model) for branch in branches) as updates, torch.no_grad():
        model.loss(*few)
    seen = profile(model, *few)
    first, last = seen["grad_norm"][1], seen["grad_norm"][-1]
    return {
        "loss": round(loss, 3), "entropy": round(entropy, 3), "stuck": not loss < entropy - 0.1,
        "token_cosine": seen["token_cosine"][-1], "gradient_first_over_last": float(f"{first / last:.2e}"),
        "update_rms": [float(f"{update.square().mean().sqrt():.3g}") for update in updates],
    }  # fmt: skip


def _gradient(model: Transformer, batch: Batch, penalty: float) -> float:
    """Add the gradient of loss and penalty; return the loss alone."""
    with _outputs(model.stack.layers) as states:
        loss = model.loss(batch.inputs, batch.targets)
    cosines = torch.stack([_cosine(state) for state in states])
    (loss + penalty * cosines.square().mean()).backward()
    return loss.item()


def _cosine(state: torch.Tensor) -> torch.Tensor:
    """Mean cosine of two tokens of a sequence, a token with itself included; with a gradient."""
    return torch.nn.functional.normalize(state, dim=-1).mean(-2).square().sum(-1).mean()


@contextmanager
def _outputs(modules: Iterable[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """What these modules return within this context, in the order of their calls."""
    found: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for module in modules:
            hook = module.register_forward_hook(lambda _module, _args, out: found.append(cast(torch.Tensor, out)))
            hooks.callback(hook.remove)
        yield found


def _branches(model: Transformer) -> list[nn.ModuleList]:
    """The sublayers of every layer."""
    return [cast(nn.ModuleList, layer.branches) for layer in model.stack.layers]


if __name__ == "__main__":
    main(tyro.cli(Arguments))
