"""Restore global and model state after a burst: weights, random numbers, threads, the handling of denormals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from normlab.probes.sharded import reshard
from normlab.probes.untouched import untouched
from normlab.targets.target import Target
from normlab.utils.seeded import seeded
from normlab.utils.threads import one_thread

NARROW = 256
"""Width up to which one thread is used: small products gain little from a second one, and may wait for it."""

_DENORMAL = 1e-42


@contextmanager
def fresh_model(
    target: Target, *, depth: int | None = None, width: int | None = None, seed: int = 0
) -> Iterator[nn.Module]:
    """Context manager: the target's model in training mode; a user's own module is restored afterwards."""
    with seeded(seed), few_threads(width or target.width):
        model = target.build(depth=depth, width=width, seed=seed)
        with preserved(model) if target.kind == "module" else nullcontext():
            model.train()
            yield model


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Context manager: restore parameters, gradients, buffers, random numbers and training modes at the end."""
    reshard(model)
    flags = [(module, module.training) for module in model.modules()]
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with untouched(model):
            yield
    finally:
        reshard(model)
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        for module, flag in flags:
            module.training = flag


@contextmanager
def quiet_numbers() -> Iterator[None]:
    """Context manager: flush denormal numbers to zero; vanished gradients would make a CPU several times slower."""
    was_on = bool(torch.tensor(_DENORMAL) * 1.0 == 0.0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)


def few_threads(width: int | None) -> AbstractContextManager[None]:
    """Context manager: run a narrow model on one thread."""
    return one_thread(when=width is not None and width <= NARROW)
