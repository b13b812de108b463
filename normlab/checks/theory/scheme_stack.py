"""Find the modules of a scheme in a model: those of NormLab's own stack, or of a converted Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from normlab.probes.blocks import eager
from normlab.stack import Layer, Stack

if TYPE_CHECKING:
    # Needs transformers, without which there is no converted model.
    from normlab.hf.conversion.converted_layer import ConvertedStack

    SchemeStack = Stack | ConvertedStack


def find_stack(model: nn.Module) -> SchemeStack | None:
    """The scheme's modules in a model; None if there are none, or if layers change the state in another way."""
    parts = list(eager(model).modules())
    own = next((module for module in parts if isinstance(module, Stack)), None)
    if own is not None:
        return own
    rules_of: Callable[[nn.Module], Any] | None = next(
        (part.rules_of for part in parts if hasattr(part, "rules_of")), None
    )  # type: ignore[assignment]
    return None if rules_of is None else rules_of(eager(model)).stack


def boundary(layer: Any) -> nn.Module:
    """The module of a layer that takes a state and returns the next; behind a converted layer's may be the exit."""
    return layer if isinstance(layer, Layer) else layer.block
