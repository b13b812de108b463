"""Keep compiled models in this process, so that runs of the same shape compile once.

torch.compile takes 7 to 25 seconds for a model in a new process. A process that executes many runs (`keep_models`)
keeps the model of a run that has ended. The next run of that shape gets it with new initial weights, which are bit for
bit those of a new model. torch 2.13 would also find the compiled code for a new module of the same shape; for the same
module with the same tensors it does so in any version.
"""

from __future__ import annotations

import gc
import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.models.transformer import Transformer
from normlab.utils.uninitialized import poison_

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig

MOST_MODELS = 16
MOST_BYTES = 4 * 2**30
"""Limits of what is kept: models, and memory of their weights together."""

_RECOMPILATIONS = 512
"""Versions of a function that torch.compile may make before it gives up; its default of 8 suits one model."""

_NOT_IN_SHAPE = (
    "data", "val_data", "val_fraction", "val_sets", "tokenizer", "tokens", "images", "eval_tokens", "seed", "lr",
    "weight_decay", "betas", "eps", "clip", "optimiser", "schedule", "warmup", "final", "decay", "branches",
    "continued", "evals", "saves", "keep", "trouble", "spike", "stop_hopeless", "sinks", "cuda_graphs",
)  # fmt: skip
"""Fields of a run that neither its modules nor their compiled code depend on."""


@dataclass(frozen=True)
class BuiltModel:
    """A model with its compiled functions."""

    model: Transformer
    loss: Callable[..., torch.Tensor]
    """The training loss of a batch."""
    measure: Callable[..., torch.Tensor]
    """What an evaluation measures on a batch."""

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.model))


class ModelCache:
    """Models of runs that have ended, by shape; the one unused for longest is dropped first."""

    def __init__(self, most: int = MOST_MODELS, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, BuiltModel] = OrderedDict()

    def take(self, shape: str) -> BuiltModel | None:
        """The model of a shape, which the cache gives away; None if there is none."""
        return self._kept.pop(shape, None)

    def give_back(self, shape: str, built: BuiltModel) -> None:
        """Keep a model for the next run of its shape."""
        built.model.zero_grad(set_to_none=True)
        self._kept[shape] = built
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self._kept.popitem(last=False)
            # Its cycles may be among what the collector was told to leave alone.
            gc.unfreeze()

    @property
    def bytes(self) -> int:
        """Memory of the weights of all models that are kept."""
        return sum(built.bytes for built in self._kept.values())


_cache: ModelCache | None = None


def keep_models() -> None:
    """Keep models from now on: this process executes many runs."""
    global _cache
    _cache = _cache or ModelCache()


def kept_models() -> ModelCache | None:
    """The models that this process keeps; None: it keeps none."""
    return _cache


def shape_of(config: TrainConfig) -> str:
    """A hash of what decides the modules and the compiled code of a run: equal ones can share a model."""
    # Unknown fields count: a run that differs in one gets a model of its own.
    known = {name: value for name, value in config.shared_dict().items() if name not in _NOT_IN_SHAPE}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The compiled function."""
    return torch.compile(function, **compile_options())


def compile_options() -> dict[str, Any]:
    """Options of torch.compile for one of many models.

    Never for sizes that vary: another batch size of another run would make it slower.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, _RECOMPILATIONS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _RECOMPILATIONS)
    # The compiler itself reads .grad of the states between layers, which are not leaves.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return {"dynamic": False}


def reinitialise(model: Transformer, device: torch.device, seed: int) -> Transformer:
    """Initialise a used model in place; the weights are those of a new one with this seed."""
    for tensor in _tensors(model):
        # As after `to_empty`: a weight that no rule writes is noticed.
        poison_(tensor)
    model.zero_grad(set_to_none=True)
    model.train()
    return model.init_(generator=torch.Generator(device).manual_seed(seed))


def _tensors(model: nn.Module) -> list[Any]:
    return [*model.parameters(), *model.buffers()]
