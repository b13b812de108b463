"""NormLab in the Hugging Face stack. Importing it makes NormLab's models known to the library's Auto classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import import_optional, loader

import_optional("transformers", "hf", "normlab.hf")

# At once, not on first use: the Auto classes must know them.
from normlab.hf.exporting.configuration import NormLabConfig  # noqa: E402
from normlab.hf.exporting.modelling import NormLabForCausalLM  # noqa: E402

if TYPE_CHECKING:
    from normlab.hf.conversion.anatomy import Anatomy, Limb
    from normlab.hf.conversion.convert import FunctionChanges, convert
    from normlab.hf.conversion.converted_layer import ConvertedLayer
    from normlab.hf.conversion.flow import STATE
    from normlab.hf.conversion.identify import SchemeIdentity, identify
    from normlab.hf.conversion.load import load
    from normlab.hf.conversion.scheme_rules import Rules, rules
    from normlab.hf.exporting.export import export
    from normlab.hf.trainer import NormLabCallback, optimizer_cls_and_kwargs

__all__ = [
    "STATE",
    "Anatomy",
    "ConvertedLayer",
    "FunctionChanges",
    "Limb",
    "NormLabCallback",
    "NormLabConfig",
    "NormLabForCausalLM",
    "Rules",
    "SchemeIdentity",
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
        "export": "exporting.export",
        "optimizer_cls_and_kwargs": "trainer",
        # the library's models under our schemes
        "STATE": "conversion.flow",
        "Anatomy": "conversion.anatomy",
        "ConvertedLayer": "conversion.converted_layer",
        "FunctionChanges": "conversion.convert",
        "SchemeIdentity": "conversion.identify",
        "Limb": "conversion.anatomy",
        "Rules": "conversion.scheme_rules",
        "convert": "conversion.convert",
        "identify": "conversion.identify",
        "load": "conversion.load",
        "rules": "conversion.scheme_rules",
    },
    renamed={"Identity": "normlab.hf.SchemeIdentity"},
)
