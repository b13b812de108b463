"""Registry of schemes: look up a scheme by name, alias, entry point or file; parse `peri(step=0.1)`."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from normlab.errors import NormLabError, unknown
from normlab.schemes.attnres import AttnRes
from normlab.schemes.catalog import reference
from normlab.schemes.contract.options import angle
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.deepnorm import DeepNorm
from normlab.schemes.dual import Dual
from normlab.schemes.gated import Gated
from normlab.schemes.geonorm import GeoNorm
from normlab.schemes.hc import HC
from normlab.schemes.highway import Highway
from normlab.schemes.hybrid import Hybrid
from normlab.schemes.keel import Keel
from normlab.schemes.lambdas import Lambdas
from normlab.schemes.layerscale import LayerScale
from normlab.schemes.lns import LNS
from normlab.schemes.mhc import MHC
from normlab.schemes.mix import Mix
from normlab.schemes.ngpt import NGPT
from normlab.schemes.none import NoNorm
from normlab.schemes.output import Output
from normlab.schemes.peri import Peri
from normlab.schemes.post import Post
from normlab.schemes.pre import Pre
from normlab.schemes.siamese import Siamese
from normlab.schemes.spannorm import SpanNorm

ENTRY_POINT_GROUP = "normlab.schemes"
"""Entry-point group under which other packages register scheme classes; users type the class's `name`."""

_SCHEMES: dict[str, type[Scheme]] = {}
_ALIASES: dict[str, str] = {}
_permanent: set[type[Scheme]] = set()
"""Schemes that every process finds by name: NormLab's own and those of entry points."""


def register(cls: type[Scheme]) -> type[Scheme]:
    """Register a scheme class of your own under its name and aliases; can be used as a decorator."""
    reference.check_class(cls, getattr(cls, "__qualname__", repr(cls)))
    names = [cls.name, *cls.aliases, *cls.variants]
    for name in names:
        owner = _owner(name)
        if owner is not None and not _is_same(owner, cls):
            raise NormLabError(f"scheme name {name!r} is taken by {owner.__name__}; choose another")
    _SCHEMES[cls.name] = cls
    _ALIASES.update({_plain(name): cls.name for name in names})
    return cls


def unregister(cls: type[Scheme]) -> None:
    """Remove a scheme from the registry, e.g. after a test."""
    _SCHEMES.pop(cls.name, None)
    _permanent.discard(cls)
    for name in [name for name, owner in _ALIASES.items() if owner == cls.name]:
        del _ALIASES[name]


def list_schemes() -> list[str]:
    """The names of all schemes, sorted."""
    _load_plugins()
    return sorted(_SCHEMES)


def find_class(name: str) -> type[Scheme]:
    """The class of a name, an alias or a reference such as `highway.py:Highway`, whose file is then imported."""
    if named := reference.read(name):
        return reference.find(named)
    _load_plugins()
    owner = _owner(name)
    if owner is None and (parts := name.replace(",", " ").split())[1:] and all(map(_owner, parts)):
        raise NormLabError(
            f"{name!r} are {len(parts)} schemes, expected one; where several are taken, write {' '.join(parts)}"
        )
    if owner is None:
        raise NormLabError(f"{unknown('scheme', name, _SCHEMES, _ALIASES)}; one of your own: path/to/file.py:Name")
    return owner


def permanent_owner(name: str) -> type[Scheme] | None:
    """The class that every process finds by this name; None if there is none."""
    _load_plugins()
    owner = _owner(name)
    return owner if owner in _permanent else None


def scheme(spec: str | Scheme, **options: Any) -> Scheme:
    """Make a scheme from its name: `scheme("geonorm", decay="sqrt")`, `scheme("peri(step=0.1)")`.

    For a scheme of your own give its file or module: `scheme("highway.py:Highway(gate=-2)")`, which imports that file.
    """
    if isinstance(spec, Scheme):
        return dataclasses.replace(spec, **_known(type(spec), options)) if options else spec
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may have no type checker
        raise NormLabError(f"expected a scheme or its name, got {type(spec).__name__}; try 'pre'")
    name, written = parse(spec)
    cls = find_class(name)
    variants = [options for variant, options in cls.variants.items() if _plain(variant) == _plain(name)]
    meant: Mapping[str, Any] = variants[0] if variants else {}
    return _made(cls, {**meant, **written, **options})


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse a specification: `"peri(step=0.1)"` → `("peri", {"step": 0.1})`; nothing is evaluated.

    Values are Python literals, words such as sqrt or decay-first, and multiples of pi.
    """
    name, written = _split(spec.strip())
    if not written:
        return name, {}
    problem = NormLabError(f"cannot read scheme {spec!r}; expected e.g. peri(step=0.1) or geonorm(decay='sqrt')")
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise problem
        return name.strip(), {_keyword(k, problem): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise problem from None


def _split(spec: str) -> tuple[str, str]:
    """(name, options in brackets). The path of a file may contain brackets, too."""
    if named := reference.read(spec):
        return spec[: len(spec) - len(named.options)].strip(), named.options
    name, bracket, options = spec.partition("(")
    return name, bracket + options


def _made(cls: type[Scheme], options: dict[str, Any]) -> Scheme:
    """Construct the scheme; an error in a user's class becomes one line."""
    try:
        return cls(**_numbers(cls, _known(cls, options)))
    except NormLabError:
        raise
    except Exception as error:
        if cls.origin() is None:
            raise
        first = str(error).strip().partition("\n")[0]
        raise NormLabError(f"{cls.name} cannot be made: {type(error).__name__}: {first}") from error


def _numbers(cls: type[Scheme], options: dict[str, Any]) -> dict[str, Any]:
    """Convert int to float where the class expects one. Not in NormLab's classes: runs are named by the typed text."""
    if cls in _permanent:
        return options
    kinds = get_type_hints(cls)
    whole = {name: value for name, value in options.items() if type(value) is int and kinds[name] is float}
    return options | {name: float(value) for name, value in whole.items()}


def _keyword(keyword: ast.keyword, problem: NormLabError) -> str:
    if keyword.arg is None:
        raise problem
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    # A bare word is a choice: geonorm(decay=sqrt) reads as decay='sqrt'.
    if not isinstance(node, ast.Name | ast.BinOp):
        return ast.literal_eval(node)
    text = ast.unparse(node).replace(" - ", "-")
    if re.fullmatch(r"[^\W\d]\w*(-[^\W\d]\w*)*", text):
        return text
    turn = angle(text)
    return ast.literal_eval(node) if turn is None else turn


def _known(cls: type[Scheme], options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in cls.options():
            raise unknown(f"option of {cls.name}", name, cls.options())
    return options


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _owner(name: str) -> type[Scheme] | None:
    return _SCHEMES.get(_ALIASES.get(_plain(name), ""))


def _is_same(one: type[Scheme], other: type[Scheme]) -> bool:
    """Whether two classes are the same, or versions of one whose file was changed and imported again."""
    return one is other or (one.__qualname__ == other.__qualname__ and _file(one) == _file(other) is not None)


def _file(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


@cache
def _load_plugins() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _permanent.add(register(point.load()))


for _cls in (
    AttnRes, DeepNorm, Dual, Gated, GeoNorm, HC, Highway, Hybrid, Keel, Lambdas, LayerScale, LNS, MHC, Mix, NGPT,
    NoNorm, Output, Peri, Post, Pre, Siamese, SpanNorm,
):  # fmt: skip
    _permanent.add(register(_cls))
