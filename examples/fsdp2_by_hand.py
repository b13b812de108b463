"""FSDP2 by hand, two processes on the CPU. Run it: python examples/fsdp2_by_hand.py [SCHEME]

Build on the meta device, shard, then initialise: every rank gets its part of the weights that one process would have.
"""

import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from your_own_model import YourModel
from your_text import batches, report


def train(scheme: str, steps: int = 20, **to_stack: Any) -> tuple[YourModel, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = YourModel(scheme, **to_stack)
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_()
    # Only now: sharding has put other parameters in the place of those that the model was built with.
    optimiser = torch.optim.AdamW(model.param_groups(lr=6e-3, weight_decay=0.1))
    losses = []
    for tokens in batches(steps):
        loss = model(tokens.chunk(world)[rank])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()  # every rank calls it: lengths are summed over shards
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return model, losses


def work(rank: int, world: int, folder: str, scheme: str) -> None:
    torch.set_num_threads(1)
    # On GPUs torchrun starts the processes and says who they are: init_process_group("nccl") is enough.
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    losses = train(scheme)[1]
    if rank == 0:
        report(scheme, losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        spawn(work, args=(2, folder, sys.argv[1] if sys.argv[1:] else "geonorm"), nprocs=2)
