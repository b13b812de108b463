"""Residual-normalisation schemes for Transformers, one file each.

`contract/` defines what a scheme is and holds the parts to build one from; `catalog/` looks schemes up by name and
prints them.
"""

from __future__ import annotations

import sys
import types
import warnings

from normlab.choices import Topology
from normlab.schemes.catalog.registry import find_class, list_schemes, register, scheme, unregister
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Motion
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Add, AddNorm, Step, ToSphere, Write
from normlab.schemes.contract.scales import BoundedSequential, ConstantScale, LearnedScale
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site
from normlab.utils.lazy import moved

__all__ = [
    "Add",
    "AddNorm",
    "Block",
    "BoundScheme",
    "BoundedSequential",
    "ConstantScale",
    "Law",
    "LearnedScale",
    "Motion",
    "Need",
    "ParallelBlock",
    "Scheme",
    "SerialBlock",
    "Site",
    "Step",
    "ToSphere",
    "Topology",
    "Write",
    "find_class",
    "list_schemes",
    "register",
    "scheme",
    "unregister",
]

# Names of version 0.1, which schemes in users' files may import.
__getattr__ = moved(
    __name__,
    {
        "Bound": "normlab.schemes.BoundScheme",
        "Chain": "normlab.schemes.BoundedSequential",
        "Constant": "normlab.schemes.ConstantScale",
        "Scale": "normlab.schemes.LearnedScale",
        "find": "normlab.schemes.find_class",
        "names": "normlab.schemes.list_schemes",
    },
)


class _CallablePackage(types.ModuleType):
    # Version 0.1 listed its schemes by calling the package.
    def __call__(self) -> list[str]:
        warnings.warn("normlab.schemes() is now normlab.list_schemes()", DeprecationWarning, stacklevel=2)
        return list_schemes()


sys.modules[__name__].__class__ = _CallablePackage
