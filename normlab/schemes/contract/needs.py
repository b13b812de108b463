"""Modules that a scheme places inside a sublayer or the head: query-key norms, softmax scale, logit scale and others.

A scheme lists what it needs. A sublayer that supports a need lists its name in `offers` and takes the module in
`accept(need, module)`. The scheme builds the module from the sizes of the sublayer (`heads`, `head_dim`, `hidden`,
...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from normlab.errors import NormLabError
from normlab.schemes.contract.site import Kind

NeedName = Literal[
    "q-norm",
    "k-norm",
    "v-norm",
    "qk-after-rotary",
    "softmax-scale",
    "gate-scale",
    "up-scale",
    "logit-scale",
    "untied-head",
]

PLACES: dict[str, str] = {
    "q-norm": "a module on the queries (..., heads, head_dim), before rotary",
    "k-norm": "a module on the keys (..., heads, head_dim), before rotary",
    "v-norm": "a module on the values (..., heads, head_dim)",
    "qk-after-rotary": "one module on queries and keys (..., heads, head_dim), after rotary",
    "softmax-scale": "a number in place of 1/sqrt(head_dim)",
    "gate-scale": "a module on the gate (..., hidden) before its nonlinearity",
    "up-scale": "a module on the hidden layer (..., hidden)",
    "logit-scale": "a module on the logits (..., vocabulary)",
    "untied-head": "a head with a matrix of its own",
}


@dataclass(frozen=True)
class Need:
    """One module or number that a scheme places inside a sublayer or the head."""

    name: NeedName
    build: Callable[[Any], nn.Module | float]
    """Builds the module or number for a given sublayer, from its sizes."""

    @property
    def in_head(self) -> bool:
        """Whether this concerns the head and not the sublayers."""
        return self.name in ("logit-scale", "untied-head")

    @property
    def kind(self) -> Kind:
        """What kind of sublayer this concerns."""
        return "mlp" if self.name in ("gate-scale", "up-scale") else "attention"

    def __str__(self) -> str:
        return f"{self.name} ({PLACES[self.name]})"


def meet_needs(needs: Sequence[Need], modules: Iterable[nn.Module], who: str) -> None:
    """Build every need for the modules that offer it; raises if no module offers one. `who` is named in the error."""
    modules = list(modules)
    unmet = [need for need in needs if not any(need.name in offers(module) for module in modules)]
    if unmet:
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise NormLabError(
            f"{who} needs {'; '.join(map(str, unmet))}, which {kinds} does not offer; use sublayers that list it in "
            f"`offers` (ours do), or pass residual_only=True for the residual part alone"
        )
    for need in needs:
        for module in modules:
            if need.name in offers(module):
                module.accept(need.name, need.build(module))  # pyright: ignore[reportCallIssue]


def offers(module: nn.Module) -> frozenset[str]:
    """Names of the needs that a module supports."""
    return frozenset(getattr(module, "offers", ()))
