"""The licence that a package states in its metadata, and whether it is one that lets its text be used freely."""

from __future__ import annotations

import re
from email.message import Message

PERMISSIVE = frozenset(
    ("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
     "CC0-1.0", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "NCSA", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
     "ZPL-2.1", "public domain")
)  # fmt: skip
"""Names of SPDX, and those of classifiers that leave the variant open."""

_CLASSIFIER = "License :: "
_CLASSIFIED = {
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "OSI Approved :: BSD License": "BSD",
    "OSI Approved :: Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "OSI Approved :: ISC License (ISCL)": "ISC",
    "OSI Approved :: MIT License": "MIT",
    "OSI Approved :: MIT No Attribution License (MIT-0)": "MIT-0",
    "OSI Approved :: Python Software Foundation License": "PSF-2.0",
    "OSI Approved :: The Unlicense (Unlicense)": "Unlicense",
    "OSI Approved :: Zope Public License": "ZPL-2.1",
    "OSI Approved :: zlib/libpng License": "Zlib",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
    "Public Domain": "public domain",
}
_SAID = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd license": "BSD",
    "mit license": "MIT",
    **{name.lower(): name for name in PERMISSIVE},
}


def licences(metadata: Message) -> list[str]:
    """All licences that the metadata of a wheel name: in an expression, else in classifiers, else in free text."""
    if expression := metadata["License-Expression"]:
        return _named(str(expression))
    classifiers = [str(line).removeprefix(_CLASSIFIER) for line in metadata.get_all("Classifier", ())
                   if str(line).startswith(_CLASSIFIER) and line != f"{_CLASSIFIER}OSI Approved"]  # fmt: skip
    if classifiers:
        return sorted({_CLASSIFIED.get(name, name) for name in classifiers})
    said = str(metadata["License"] or "").strip()
    # A whole licence may stand here; its first line is no name then.
    return [_SAID.get(said.lower(), said)] if said and "\n" not in said else []


def are_permissive(names: list[str]) -> bool:
    """Whether a package states licences and all are permissive; of a choice between licences, too, every one."""
    return bool(names) and PERMISSIVE.issuperset(names)


def _named(expression: str) -> list[str]:
    parts = re.split(r"\b(?:AND|OR)\b|[()]", expression)
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
