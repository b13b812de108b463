"""Hugging Face integration: NormLab models as `transformers` models, and `transformers` models under any scheme.

Importing this package registers NormLab's models with the Auto classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import import_optional, loader

import_optional("transformers", "hf", "normlab.hf")

# At once, not on first use: the Auto classes must know them.
from normlab.hf.exporting.configuration import NormLabConfig  # noqa: E402
from normlab.hf.exporting.modelling import NormLabForCausalLM  # noqa: E402

if TYPE_CHECKING:
    from normlab.hf.conversion.convert import FunctionChanges, convert
    from normlab.hf.conversion.converted_layer import ConvertedLayer
    from normlab.hf.conversion.identify import SchemeIdentity, identify
    from normlab.hf.conversion.layer_structure import LayerStructure, ResidualBranch
    from normlab.hf.conversion.load import load
    from normlab.hf.conversion.scheme_rules import Rules, rules
    from normlab.hf.conversion.trace import HIDDEN_STATE
    from normlab.hf.exporting.export import export
    from normlab.hf.trainer import NormLabCallback, optimizer_cls_and_kwargs

__all__ = [
    "HIDDEN_STATE",
    "ConvertedLayer",
    "FunctionChanges",
    "LayerStructure",
    "NormLabCallback",
    "NormLabConfig",
    "NormLabForCausalLM",
    "ResidualBranch",
    "Rules",
    "SchemeIdentity",
    "convert",
    "export",
    "identify",
    "load",
    "optimizer_cls_and_kwargs",
    "rules",
]

# No name here may be that of a module of this package: importing the module would replace it.
__getattr__ = loader(
    __name__,
    {
        # NormLab models as transformers models
        "NormLabCallback": "trainer",
        "export": "exporting.export",
        "optimizer_cls_and_kwargs": "trainer",
        # transformers models under NormLab's schemes
        "HIDDEN_STATE": "conversion.trace",
        "LayerStructure": "conversion.layer_structure",
        "ConvertedLayer": "conversion.converted_layer",
        "FunctionChanges": "conversion.convert",
        "SchemeIdentity": "conversion.identify",
        "ResidualBranch": "conversion.layer_structure",
        "Rules": "conversion.scheme_rules",
        "convert": "conversion.convert",
        "identify": "conversion.identify",
        "load": "conversion.load",
        "rules": "conversion.scheme_rules",
    },
    renamed={
        "Anatomy": "normlab.hf.LayerStructure",
        "Identity": "normlab.hf.SchemeIdentity",
        "Limb": "normlab.hf.ResidualBranch",
        "STATE": "normlab.hf.HIDDEN_STATE",
    },
)
