"""Distributed training: process group, FSDP2 sharding, collectives, gradient clipping.

`torchrun` starts the processes and sets RANK, WORLD_SIZE and LOCAL_RANK. With a single process there is no process
group and every call here is the identity. Ranks exchange values over the CPU, as JSON or as one number, so that
nothing waits for a GPU and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from normlab.errors import NormLabError, unknown
from normlab.models.transformer import Transformer
from normlab.probes.sharded import whole
from normlab.utils.files import file_error

T = TypeVar("T")
Precision = Literal["fp32", "bf16"]

# The others wait while the first rank builds a token cache or reads a large checkpoint.
_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Group:
    """The processes of a run, as one of them sees it: its rank, their number, its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, writes metrics and holds the lock."""
        return self.rank == 0

    def all_mean(self, value: float) -> float:
        """The mean of one number over the ranks, the same on each."""
        return self._reduce(value, dist.ReduceOp.SUM) / self.world

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks, on its device and without synchronisation."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def agree(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return bool(self._reduce(float(flag), dist.ReduceOp.MAX))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; anything JSON can hold. Also a barrier."""
        if self.world == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, nn.functional.pad(mine, (0, longest - len(mine))))
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(texts, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The value of the first rank; anything JSON can hold."""
        return self.gather(value if self.is_main else None)[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Call `work` on every rank and gather the results. If one rank fails, all raise: none waits for ever."""
        failure, value, caught = None, None, None
        try:
            value = work()
        except Exception as error:
            caught = error
            described = file_error("use", error) if isinstance(error, OSError) else error
            failure = str(described) or type(error).__name__
        outcomes = self.gather([failure, value])
        if failures := [text for text, _ in outcomes if text is not None]:
            raise NormLabError(failures[0]) from caught
        return [found for _, found in outcomes]

    def _reduce(self, value: float, how: Any) -> float:
        if self.world == 1:
            return float(value)
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, how)
        return shared.item()


ALONE = Group(0, 1, torch.device("cpu"))
"""A single process on the CPU."""


def start(device: str = "auto") -> Group:
    """Join the process group that torchrun has set up, if any. `device`: auto, cpu, cuda; alone also cuda:1."""
    rank, world, local_rank = (_number(name, default) for name, default in _PLACES)
    if not 0 <= rank < world:
        raise NormLabError(f"RANK={rank} and WORLD_SIZE={world} do not fit; start the processes with torchrun")
    group = Group(rank, world, pick_device(device, local_rank, world))
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    if world > 1 and not dist.is_initialized():
        _join(group)
    return group


def stop(group: Group) -> None:
    """Leave the process group, all ranks together."""
    if group.world > 1 and dist.is_initialized():
        # A gloo thread that still holds a tensor when Python exits aborts the process: give it time to finish.
        group.gather(None)
        time.sleep(0.2)
        dist.destroy_process_group()


_PLACES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise NormLabError(f"{name}={text!r}: expected a whole number; start the processes with torchrun")
    return int(text)


def pick_device(wanted: str, local_rank: int = 0, world: int = 1) -> torch.device:
    """The torch device of a name; raises if this machine does not have it."""
    kind, _, index = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise unknown("device", wanted, ("auto", "cpu", "cuda"))
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NormLabError("no GPU here; try --device cpu, or look at normlab doctor")
    if index and (world > 1 or not index.isdecimal()):
        raise NormLabError(f"device {wanted!r}: one of many processes takes the GPU of its local rank; try cuda")
    chosen, there = int(index or local_rank), torch.cuda.device_count()
    if chosen >= there:
        raise NormLabError(f"GPU {chosen} does not exist, there are {there}; start as many processes as there are GPUs")
    return torch.device("cuda", chosen)


def _join(group: Group) -> None:
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise NormLabError(f"WORLD_SIZE={group.world} without {', '.join(missing)}; start the processes with torchrun")
    backend = "cpu:gloo,cuda:nccl" if group.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT, rank=group.rank, world_size=group.world)


def shard(
    model: Transformer,
    group: Group,
    *,
    precision: Precision = "fp32",
    checkpointing: bool = False,
    compile: bool = False,  # noqa: A002
) -> Transformer:
    """Shard a model over the ranks with FSDP2: every layer, then the rest. Best called on the meta device.

    A single process shards nothing, and leaves bf16 to autocast. Weights are gathered for `model(...)`,
    `model.loss(...)` and `model.features(...)`; those outside the layers (the embedding's, for the head) stay gathered
    until the backward pass.
    """
    if precision not in get_args(Precision):
        raise unknown("precision", precision, get_args(Precision))
    model.stack.checkpointing = checkpointing
    if compile:
        for layer in model.stack.layers:
            layer.compile()
    if group.world == 1:
        return model
    mesh = init_device_mesh(group.device.type, (group.world,))
    for part in (*model.stack.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=_policy(precision))
    register_fsdp_forward_method(model, "features")
    return model


def initialise(model: Transformer, group: Group, seed: int) -> Transformer:
    """Allocate and initialise a model from the meta device: the same weights from a seed on any number of ranks.

    Bit for bit, unless the scheme constrains its weights: norms summed over shards may round differently.
    """
    model.to_empty(device=group.device)
    return model.init_(generator=torch.Generator(group.device).manual_seed(seed))


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # Inputs stay what they are: the rotary table and an fp32 residual stream must not be rounded at every layer.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shared_like(full: torch.Tensor, target: Any) -> torch.Tensor:
    """A full tensor, sharded like `target`. All ranks call it."""
    if not hasattr(target, "full_tensor"):
        return full
    return distribute_tensor(full.to(target.device), target.device_mesh, target.placements)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the global gradient norm to `max_norm`, and return the norm before clipping.

    A norm that is not finite leaves the gradients unchanged, so that the faulty layer can be found. `math.inf` only
    measures. The result stays on the device: no synchronisation.
    """
    if not max_norm > 0:
        raise NormLabError(f"max_norm must be positive, got {max_norm}; try 1.0, or inf to only measure")
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if max_norm < math.inf:
        clip_grads_with_norm_(parameters, max_norm, torch.where(norm.isfinite(), norm, 0.0))
    return norm
