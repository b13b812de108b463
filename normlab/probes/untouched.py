"""Context managers that run a model for a measurement and restore it afterwards.

`untouched` restores gradients, buffers and random numbers, `eager_mode` switches compiled code off, `at_rest` does both
in evaluation mode.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, keep_grads: bool = False) -> Generator[None, None, None]:
    """Context manager: clear gradients and enable autograd; restore gradients, buffers and random numbers at the end.

    `keep_grads` leaves the gradients that were computed inside in the parameters.
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        for parameter, _ in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
            yield
    finally:
        for parameter, grad in [] if keep_grads else grads:
            parameter.grad = grad
        with torch.no_grad():
            for holder, name, buffer, value in buffers:
                holder[name] = buffer.copy_(value)


def eager_mode() -> AbstractContextManager[None]:
    """Context manager: run compiled modules eagerly, because hooks are not called in compiled code."""
    # Nothing can have been compiled before the compiler was imported, which takes a second.
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@contextmanager
def at_rest(model: nn.Module) -> Generator[None, None, None]:
    """Context manager: evaluation mode, eager and `untouched`; restores the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as state:
        state.enter_context(untouched(model))
        state.enter_context(eager_mode())
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training
