"""Two processes on one machine, for tests of what is shared out over them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["tests.train.child"]
"""What the process imports that ranks are forked from: torch, FSDP and the trainer, which take seconds."""


def spawn(work: Callable[..., None], args: tuple[Any, ...] = (), *, nprocs: int = 2) -> None:
    """Like `torch.multiprocessing.spawn`, in processes forked from one that has imported torch and computed nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # That process may be older than the variables of this test.
    mp.start_processes(_start, (work, dict(os.environ), args), nprocs, start_method="forkserver")


def _start(rank: int, work: Callable[..., None], environment: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work(rank, *arguments)


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
