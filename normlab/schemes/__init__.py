"""Residual-normalisation schemes: one file each, everything there is to say about one in its file.

`contract/` says what a scheme is and holds the parts to build one from; `catalog/` finds and shows schemes.
"""

from __future__ import annotations

import sys
import types
import warnings

from normlab.choices import Topology
from normlab.schemes.catalog.registry import find, list_schemes, register, scheme, unregister
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.law import Law, Motion
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Add, AddNorm, Chain, Constant, Scale, Step, ToSphere, Write
from normlab.schemes.contract.scheme import BoundScheme, Scheme, Site

__all__ = [
    "Add",
    "AddNorm",
    "Block",
    "BoundScheme",
    "Chain",
    "Constant",
    "Law",
    "Motion",
    "Need",
    "ParallelBlock",
    "Scale",
    "Scheme",
    "SerialBlock",
    "Site",
    "Step",
    "ToSphere",
    "Topology",
    "Write",
    "find",
    "list_schemes",
    "register",
    "scheme",
    "unregister",
]


class _CallablePackage(types.ModuleType):
    # Version 0.1 listed its schemes by calling the package.
    def __call__(self) -> list[str]:
        warnings.warn("normlab.schemes() is now normlab.list_schemes()", DeprecationWarning, stacklevel=2)
        return list_schemes()


sys.modules[__name__].__class__ = _CallablePackage
