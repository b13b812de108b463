"""Gradient norm and relative update ‖Δw‖ / ‖w‖ of the parameters of each block in one optimiser step.

The gradient is measured whenever autograd has added to it, so the last measurement is of the sum over all passes,
before it is clipped and whether or not it is cleared inside the step.

The update is estimated without a copy of the model. Of every parameter with n entries at most 4096 are kept, drawn with
replacement by a generator of our own, and

    ‖Δw‖² ≈ Σ_parameters n · mean of Δw² over the kept entries,    ‖w‖² likewise, of the values before the step

Both sums are unbiased; smaller parameters are kept whole, which makes their part exact. Of a parameter that is sharded
over processes only the part held here is known, and stands for all of it.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import math
from contextlib import ExitStack

import torch
from torch import nn

from normlab.norms import widen
from normlab.probes.blocks import BlockStack
from normlab.probes.ledger import Ledger
from normlab.probes.measures import wide
from normlab.probes.sharded import local

# One launch for a whole list of tensors; torch's own optimisers and gradient clipping are made of these.
_foreach_sub, _foreach_norm = torch._foreach_sub, torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

KEPT = 4096
_SEED = 2510


class WeightWatch:
    """Hooks on the parameters of one stack's blocks."""

    def __init__(self, stack: BlockStack, ledger: Ledger):
        self.stack, self.ledger = stack, ledger
        blocks = dict.fromkeys(stack.blocks)
        self._samples = {block: _Samples(block) for block in blocks}
        self._gradients: dict[nn.Module, dict[str, int]] = {block: {} for block in blocks}

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; closing `hooks` removes them."""
        for block in self._gradients:
            for name, parameter in block.named_parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._keeper(block, name)).remove)

    def _keeper(self, block: nn.Module, name: str):
        def keep(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._gradients[block][name] = self.ledger.write(_norm(parameter.grad))

        return keep

    def finish(self) -> None:
        """Compare with the current parameters."""
        for samples in self._samples.values():
            samples.finish(self.ledger)

    def series(self, blocks: list[nn.Module]) -> dict[str, list[float | None]]:
        """grad_w and upd_ratio for the given runs of blocks; the second is None if no parameter moved at all."""
        moved = any(samples.moved(self.ledger) != 0.0 for samples in self._samples.values())
        ratios = [self._ratio(block) if moved else None for block in blocks]
        return {"grad_w": [self._gradient(block) for block in blocks], "upd_ratio": ratios}

    def sizes(self, blocks: list[nn.Module]) -> dict[str, list[float | None]]:
        """The RMS of every matrix in the given runs of blocks, by its path inside a block."""
        found = [self._samples[block].sizes(self.ledger) for block in blocks]
        return {
            name: [sizes.get(name) for sizes in found] for name in dict.fromkeys(n for sizes in found for n in sizes)
        }

    def _gradient(self, block: nn.Module) -> float | None:
        norms = [self.ledger[place] for place in self._gradients[block].values()]
        return math.hypot(*norms) if norms else None

    def _ratio(self, block: nn.Module) -> float | None:
        samples = self._samples[block]
        size = samples.size(self.ledger)
        return samples.moved(self.ledger) / size if size else None


class _Samples:
    """Earlier values of some entries of every parameter of a block; gives the norms of these and of their change."""

    @torch.no_grad()
    def __init__(self, block: nn.Module):
        self.parameters = {name: p for name, p in block.named_parameters() if local(p.detach()).numel()}
        self.before = [entries.clone() for entries in self._look()]
        self.weights = [p.numel() / len(kept) for p, kept in zip(self.parameters.values(), self.before, strict=True)]
        self._sizes: list[int] = []
        self._moves: list[int] = []

    def _look(self) -> list[torch.Tensor]:
        return [widen(_kept(local(parameter.detach()))) for parameter in self.parameters.values()]

    @torch.no_grad()
    def finish(self, ledger: Ledger) -> None:
        if self.parameters:
            changes = _foreach_sub(self._look(), self.before)
            self._moves = [ledger.write(norm) for norm in _foreach_norm(changes)]
            self._sizes = [ledger.write(norm) for norm in _foreach_norm(self.before)]

    def moved(self, ledger: Ledger) -> float:
        """‖Δw‖."""
        return _total([ledger[place] for place in self._moves], self.weights)

    def size(self, ledger: Ledger) -> float:
        """‖w‖."""
        return _total([ledger[place] for place in self._sizes], self.weights)

    def sizes(self, ledger: Ledger) -> dict[str, float]:
        """√mean w² of each matrix."""
        rows = zip(self.parameters.items(), self.before, self._sizes, strict=True)
        return {name: ledger[place] / math.sqrt(len(kept)) for (name, p), kept, place in rows if p.ndim >= 2}


def _kept(flat: torch.Tensor) -> torch.Tensor:
    flat = flat.reshape(-1)
    return flat if flat.numel() <= KEPT else flat[_places(flat.numel(), flat.device)]


@functools.lru_cache(maxsize=64)
def _places(total: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(total, (KEPT,), generator=generator, device="cpu").to(device)


@torch.no_grad()
def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Norm of a gradient; not finite if any entry is not finite."""
    part = local(gradient.detach())
    return torch.linalg.vector_norm(part, dtype=wide(part)) * math.sqrt(gradient.numel() / max(part.numel(), 1))


def _total(norms: list[float], weights: list[float]) -> float:
    return math.hypot(*(norm * math.sqrt(weight) for norm, weight in zip(norms, weights, strict=True)))
