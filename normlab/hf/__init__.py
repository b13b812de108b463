"""NormLab in the Hugging Face stack. Importing it makes NormLab's models known to the library's Auto classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.data.optional import need
from normlab.lazy import loader

need("transformers", "hf", "normlab.hf")

# At once, not on first use: the Auto classes must know them.
from normlab.hf.configuration import NormLabConfig  # noqa: E402
from normlab.hf.modelling import NormLabForCausalLM  # noqa: E402

if TYPE_CHECKING:
    from normlab.hf.anatomy import Anatomy, Limb
    from normlab.hf.conversion import FunctionChanges, convert
    from normlab.hf.exporting import export
    from normlab.hf.flow import STATE
    from normlab.hf.identity import Identity, identify
    from normlab.hf.layer import ConvertedLayer
    from normlab.hf.loading import load
    from normlab.hf.scheme_rules import Rules, rules
    from normlab.hf.trainer import NormLabCallback, optimizer_cls_and_kwargs

__all__ = [
    "STATE",
    "Anatomy",
    "ConvertedLayer",
    "FunctionChanges",
    "Identity",
    "Limb",
    "NormLabCallback",
    "NormLabConfig",
    "NormLabForCausalLM",
    "Rules",
    "convert",
    "export",
    "identify",
    "load",
    "optimizer_cls_and_kwargs",
    "rules",
]

# No name here may be that of a module of this package: whoever imports the module would replace it.
__getattr__ = loader(
    __name__,
    {
        # NormLab's models as the library's
        "NormLabCallback": "trainer",
        "export": "exporting",
        "optimizer_cls_and_kwargs": "trainer",
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
