"""What a step does to the parameters of each block: the norm of their gradient, and ‖Δw‖ / ‖w‖ of the update.

The gradient is measured whenever autograd has added to it, so the last look is at the sum over all passes, before it is
clipped and whether or not it is cleared inside the step.

The update is estimated without a copy of the model. Of every parameter with n entries at most 4096 are kept, drawn with
replacement by a generator of our own, and

    ‖Δw‖² ≈ Σ_parameters n · mean of Δw² over the kept entries,    ‖w‖² likewise, of the values before the step

Both sums are unbiased; smaller parameters are kept whole, which makes their part exact.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import nn

from normlab.stability import measures
from normlab.stability.blocks import BlockStack
from normlab.stability.ledger import Ledger

KEPT = 4096
_SEED = 2510


class WeightWatch:
    """Listens to the parameters of one stack's blocks."""

    def __init__(self, stack: BlockStack, ledger: Ledger):
        self.stack, self.ledger = stack, ledger
        blocks = dict.fromkeys(stack.blocks)
        self._samples = {block: [_Sample(p) for p in block.parameters() if p.numel()] for block in blocks}
        self._gradients: dict[nn.Module, dict[int, int]] = {block: {} for block in blocks}
        self._updates: dict[nn.Module, tuple[int, int]] = {}

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; `hooks` takes them off."""
        for block in self._gradients:
            for k, parameter in enumerate(block.parameters()):
                if parameter.requires_grad and parameter.is_leaf:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._keeper(block, k)).remove)

    def _keeper(self, block: nn.Module, k: int):
        def keep(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._gradients[block][k] = self.ledger.write(_norm(parameter.grad.detach()))

        return keep

    @torch.no_grad()
    def finish(self) -> None:
        """Compare with the parameters as they are now."""
        for block, samples in self._samples.items():
            if samples:
                moved, sizes = zip(*(sample.squares() for sample in samples), strict=True)
                self._updates[block] = (self.ledger.write(_total(moved)), self.ledger.write(_total(sizes)))

    def series(self, blocks: list[nn.Module]) -> dict[str, list[float | None]]:
        """grad_w and upd_ratio for the given runs of blocks; the second is None if no parameter moved at all."""
        moved = any(self.ledger[change] != 0.0 for change, _ in self._updates.values())
        ratios = [self._ratio(block) if moved else None for block in blocks]
        return {"grad_w": [self._gradient(block) for block in blocks], "upd_ratio": ratios}

    def _gradient(self, block: nn.Module) -> float | None:
        norms = [self.ledger[place] for place in self._gradients[block].values()]
        return math.hypot(*norms) if norms else None

    def _ratio(self, block: nn.Module) -> float | None:
        if block not in self._updates:
            return None
        change, size = (self.ledger[place] for place in self._updates[block])
        return math.sqrt(change / size) if size > 0.0 else None


class _Sample:
    """A few entries of one parameter, as they were."""

    def __init__(self, parameter: torch.Tensor):
        self.parameter, self.places = parameter, None
        if parameter.numel() > KEPT:
            generator = torch.Generator().manual_seed(_SEED)
            drawn = torch.randint(parameter.numel(), (KEPT,), generator=generator, device="cpu")
            self.places = drawn.to(parameter.device)
        self.before = self._look().clone()

    def _look(self) -> torch.Tensor:
        flat = self.parameter.detach().reshape(-1)
        return flat if self.places is None else flat[self.places]

    def squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimates of ‖Δw‖² and ‖w‖²."""
        before = self.before.double() if self.before.device.type != "mps" else self.before.float()
        weight = self.parameter.numel() / len(before)
        return weight * (self._look().to(before) - before).square().sum(), weight * before.square().sum()


@torch.no_grad()
def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm, which of a gradient that is not finite everywhere is NaN and not that of the rest."""
    return torch.where(measures.broken(gradient) > 0, math.nan, measures.norm(gradient))


def _total(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()
