"""NormLab in the Hugging Face stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.data.optional import need
from normlab.lazy import loader

need("transformers", "hf", "normlab.hf")

if TYPE_CHECKING:
    from normlab.hf.anatomy import Anatomy, Limb
    from normlab.hf.conversion import FunctionChanges, convert
    from normlab.hf.flow import STATE
    from normlab.hf.identity import Identity, identify
    from normlab.hf.layer import ConvertedLayer
    from normlab.hf.loading import load
    from normlab.hf.scheme_rules import Rules, rules

__all__ = [
    # the library's models under our schemes
    "STATE",
    "Anatomy",
    "ConvertedLayer",
    "FunctionChanges",
    "Identity",
    "Limb",
    "Rules",
    "convert",
    "identify",
    "load",
    "rules",
]

# No name here may be that of a module of this package: whoever imports the module would replace it.
__getattr__ = loader(
    __name__,
    {
        # the library's models under our schemes
        "STATE": "flow",
        "Anatomy": "anatomy",
        "ConvertedLayer": "layer",
        "FunctionChanges": "conversion",
        "Identity": "identity",
        "Limb": "anatomy",
        "Rules": "scheme_rules",
        "convert": "conversion",
        "identify": "identity",
        "load": "loading",
        "rules": "scheme_rules",
    },
)
