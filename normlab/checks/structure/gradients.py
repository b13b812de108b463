"""Find untrained parameters: the last step of a burst at which each parameter had a non-zero gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from normlab.probes.sharded import whole

_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

LAST_STEPS = 5
"""A parameter that had no gradient in so many steps at the end has lost it: an expert may be left out of a batch."""


@dataclass
class GradientTrace:
    """The gradients of a model's free parameters over the steps of a burst."""

    last: dict[str, int] = field(default_factory=dict)
    """Last step with a gradient, by parameter; -1: none."""
    steps: int = 0

    @torch.no_grad()
    def take(self, model: nn.Module) -> float:
        """Record a step after its backward pass; the largest entry of all gradients: finite if all entries are."""
        free = {name: p for name, p in model.named_parameters() if p.requires_grad}
        graded = {name: p.grad for name, p in free.items() if p.grad is not None and p.grad.numel()}
        sizes = _largest(graded)
        for name in free:
            self.last.setdefault(name, -1)
            if sizes.get(name, 0.0) != 0.0:
                self.last[name] = self.steps
        self.steps += 1
        return math.nan if any(map(math.isnan, sizes.values())) else max(sizes.values(), default=0.0)

    @property
    def never(self) -> tuple[str, ...]:
        """Parameters that had no gradient at any step."""
        return tuple(name for name, step in self.last.items() if step < 0)

    @property
    def lost(self) -> tuple[str, ...]:
        """Parameters that had one, and none in the last steps."""
        first = self.steps - LAST_STEPS
        return tuple(name for name, step in self.last.items() if 0 <= step < first)


def _largest(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest entry of each gradient, in one transfer from the device."""
    if not gradients:
        return {}
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients.values()]
    norms = [whole(norm) for norm in _foreach_norm(dense, math.inf)]
    values = torch.stack([norm.float().to(norms[0].device) for norm in norms]).tolist()
    return dict(zip(gradients, values, strict=True))
