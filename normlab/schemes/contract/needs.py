"""Needs: what a scheme must change inside a sublayer, and how it gets it.

A scheme states its needs; a sublayer that can meet one lists it in `offers` and takes it in `accept(need, module)`. The
module is built by the scheme from the sizes the sublayer states of itself (`heads`, `head_dim`, `hidden`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from normlab.errors import NormLabError

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
    """One thing that a scheme must have inside a sublayer or the head."""

    name: NeedName
    build: Callable[[Any], nn.Module | float]
    """From the sublayer (its sizes) to what goes into it."""

    @property
    def in_head(self) -> bool:
        return self.name in ("logit-scale", "untied-head")

    def __str__(self) -> str:
        return f"{self.name} ({PLACES[self.name]})"


def meet_needs(needs: Sequence[Need], modules: Iterable[nn.Module], who: str) -> None:
    """Give every need to the modules that offer it; one that nobody offers is an error."""
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
    """What a module says it can take."""
    return frozenset(getattr(module, "offers", ()))
