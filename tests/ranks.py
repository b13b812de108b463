"""Two processes on one machine, for tests of what is shared out over them."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank: int, port: int) -> dist.Store:
    """Meet the other process in a store that the first one holds."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return store


def leave(rank: int, store: dist.Store) -> NoReturn:
    """End this process once every collective is done, the one that holds the store last.

    Nothing is torn down: gloo's threads are sometimes still running when Python does that, and C++ then aborts.
    """
    if rank == 0:
        store.wait(["the other is done"])
    else:
        store.set("the other is done", "yes")
    os._exit(0)
