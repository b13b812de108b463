"""Schemes: one file each, everything there is to say about one in its file.

`normlab.schemes()` lists their names: the package is callable, so that the list and the room share a name.
"""

from __future__ import annotations

import sys
import types

from normlab.choices import Topology
from normlab.schemes.base import Bound, Scheme, Site
from normlab.schemes.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.law import Law, Motion
from normlab.schemes.needs import Need
from normlab.schemes.parts import Add, AddNorm, Chain, Constant, Scale, Step, ToSphere, Write
from normlab.schemes.registry import find, names, register, scheme, unregister

__all__ = [
    "Add",
    "AddNorm",
    "Block",
    "Bound",
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
    "names",
    "register",
    "scheme",
    "unregister",
]


class _CallablePackage(types.ModuleType):
    def __call__(self) -> list[str]:
        return names()


sys.modules[__name__].__class__ = _CallablePackage
