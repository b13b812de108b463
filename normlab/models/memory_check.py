"""Check that a model fits into memory before it is built or trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from normlab.errors import NormLabError
from normlab.models.config import TransformerConfig
from normlab.models.estimate import MemoryEstimate, num_params, training_memory
from normlab.utils import machine
from normlab.utils.text import size

_SHALLOW = 16
"""Counts of models more than twice this deep are extrapolated linearly from this depth and twice this depth."""
_BYTES_A_BLOCK = 24_000
"""Host memory for the Python objects of one block without weights: a million blocks took 22 GB."""
_MARGIN = 0.05
"""Fraction of the free memory reserved for other processes and the allocator."""
BYTES_IN_TRAINING = 16
"""Bytes per parameter: weight, gradient and AdamW's two moments in fp32."""
_SMALLER = "a smaller --depth or --dim"


def estimate_params(config: TransformerConfig) -> int:
    """Number of parameters, at a cost that does not grow with depth."""
    return round(_along_depth(config, num_params))


def estimate_memory(config: TransformerConfig, batch: int, length: int, precision: str) -> MemoryEstimate:
    """Memory of one training step, at a cost that does not grow with depth."""

    def part(name: str) -> int:
        return round(_along_depth(config, lambda one: getattr(known[one.depth], name)))

    depths = {config.depth} if config.depth <= 2 * _SHALLOW else {_SHALLOW, 2 * _SHALLOW}
    known = {
        depth: training_memory(dataclasses.replace(config, depth=depth), batch, length, precision) for depth in depths
    }
    return MemoryEstimate(**{field.name: part(field.name) for field in dataclasses.fields(MemoryEstimate)})


def _along_depth(config: TransformerConfig, count: Callable[[TransformerConfig], int]) -> float:
    """Extrapolate a count that grows linearly with depth."""
    if config.depth <= 2 * _SHALLOW:
        return count(config)
    low, high = (count(dataclasses.replace(config, depth=depth)) for depth in (_SHALLOW, 2 * _SHALLOW))
    return high + (high - low) / _SHALLOW * (config.depth - 2 * _SHALLOW)


def check_memory_to_build(config: TransformerConfig, device: torch.device) -> None:
    """Raise if a model's weights do not fit on a device, or its Python objects do not fit into host memory."""
    check_memory_for_blocks(config.depth, _model(config))
    if device.type != "meta":
        check_memory(4 * estimate_params(config), device, _model(config))


def check_memory_for_blocks(blocks: int, what: str, advice: str = _SMALLER) -> None:
    """Raise if the Python objects of so many blocks do not fit into host memory, their weights aside."""
    check_memory(blocks * _BYTES_A_BLOCK, torch.device("cpu"), what, advice)


def check_memory_for_parameters(parameters: int, device: torch.device, what: str, advice: str = _SMALLER) -> None:
    """Raise if weights, gradients and AdamW's moments of so many parameters do not fit on a device."""
    check_memory(BYTES_IN_TRAINING * parameters, device, f"training {what}", advice)


def check_memory_to_train(
    config: TransformerConfig,
    device: torch.device,
    *,
    batch: int,
    length: int,
    precision: str,
    world: int = 1,
    compiled: bool = False,
) -> None:
    """Raise if one process of `world` does not have the memory to train a model in batches of `batch`."""
    what, free = _model(config), machine.free_memory(device)
    state = BYTES_IN_TRAINING * estimate_params(config) // world
    check_memory(state, device, f"training {what}", f"{_SMALLER}, or more GPUs" if device.type == "cuda" else _SMALLER)
    if free is None or state + _at_most(config, batch, length) < free:
        return
    in_batches = f"training {what} in batches of {batch} × {length} tokens"
    advice = "a smaller --batch or --length, --accumulate 4, or --checkpointing"
    # Before the estimate, which takes a time that grows with the batch.
    check_memory(state + _at_least(config, batch, length), device, in_batches, advice)
    found = estimate_memory(config, batch, length, precision)
    found = found.compiled() if compiled else found
    kept = found.total - found.weights - found.optimiser - found.gradients
    # GPU kernels save less than estimated, and running out is a clear error there; on a CPU the process is killed.
    kept = kept // 2 if device.type == "cuda" else kept
    check_memory(state + max(kept, 0), device, in_batches, advice)


def check_memory(needed: int, device: torch.device, what: str, advice: str = _SMALLER) -> None:
    """Raise if `needed` bytes are not free on a device."""
    free = machine.free_memory(device)
    if free is None or needed <= (1.0 - _MARGIN) * free:
        return
    name = "this machine" if device.type == "cpu" else str(device)
    raise NormLabError(f"{what} needs about {size(needed)} of memory, and {name} has {size(free)} free; try {advice}")


def _model(config: TransformerConfig) -> str:
    return f"a model of {config.depth:,} blocks of width {config.dim:,}"


def _at_least(config: TransformerConfig, batch: int, length: int) -> int:
    """The state before every block in half precision, which checkpointing keeps, too."""
    return 2 * batch * length * config.depth * config.dim


def _at_most(config: TransformerConfig, batch: int, length: int) -> int:
    """A generous upper bound on the activations of a step, so that small models need no exact estimate."""
    block = 64 * config.dim + 16 * max(1, config.experts) * config.width_of_mlp + 4 * config.heads * length
    return 4 * batch * length * (config.depth * block + 4 * config.answers) + 8 * config.answers * config.dim
