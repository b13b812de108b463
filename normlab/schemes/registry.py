"""Schemes by name: ours, those that other packages register, and the names people type for them."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from normlab.errors import NormLabError, unknown
from normlab.schemes.angles import angle
from normlab.schemes.base import Scheme
from normlab.schemes.deepnorm import DeepNorm
from normlab.schemes.dual import Dual
from normlab.schemes.geonorm import GeoNorm
from normlab.schemes.hybrid import Hybrid
from normlab.schemes.keel import Keel
from normlab.schemes.layerscale import LayerScale
from normlab.schemes.lns import LNS
from normlab.schemes.mix import Mix
from normlab.schemes.ngpt import NGPT
from normlab.schemes.none import NoNorm
from normlab.schemes.output import Output
from normlab.schemes.peri import Peri
from normlab.schemes.post import Post
from normlab.schemes.pre import Pre
from normlab.schemes.spannorm import SpanNorm

ENTRY_POINT_GROUP = "normlab.schemes"
"""Packages register a scheme class under this group; its own `name` is what users type."""

_SCHEMES: dict[str, type[Scheme]] = {}
_ALIASES: dict[str, str] = {}


def register(cls: type[Scheme]) -> type[Scheme]:
    """Make a scheme known by its name and aliases; usable as a decorator."""
    if not (isinstance(cls, type) and issubclass(cls, Scheme) and dataclasses.is_dataclass(cls)):
        raise NormLabError(f"{cls!r} is not a scheme: expected a dataclass derived from normlab.schemes.Scheme")
    names = [cls.name, *cls.aliases, *cls.variants]
    for name in names:
        owner = _owner(name)
        if owner not in (None, cls):
            raise NormLabError(f"scheme name {name!r} is taken by {owner.__name__}; choose another")  # type: ignore[union-attr]
    _SCHEMES[cls.name] = cls
    _ALIASES.update({_plain(name): cls.name for name in names})
    return cls


def unregister(cls: type[Scheme]) -> None:
    """Forget a scheme, e.g. one that a test registered."""
    _SCHEMES.pop(cls.name, None)
    for name in [name for name, owner in _ALIASES.items() if owner == cls.name]:
        del _ALIASES[name]


def names() -> list[str]:
    """The names of all schemes, sorted."""
    _load_plugins()
    return sorted(_SCHEMES)


def find(name: str) -> type[Scheme]:
    """The class behind a name or an alias."""
    _load_plugins()
    owner = _owner(name)
    if owner is None:
        raise unknown("scheme", name, _SCHEMES, _ALIASES)
    return owner


def scheme(spec: str | Scheme, **options: Any) -> Scheme:
    """A scheme from its name, e.g. `scheme("geonorm", decay="sqrt")` or `scheme("peri(step=0.1)")`."""
    if isinstance(spec, Scheme):
        return dataclasses.replace(spec, **_known(type(spec), options)) if options else spec
    if not isinstance(spec, str):
        raise NormLabError(f"expected a scheme or its name, got {type(spec).__name__}; try 'pre'")
    name, written = parse(spec)
    cls = find(name)
    meant = next((v for variant, v in cls.variants.items() if _plain(variant) == _plain(name)), {})
    return cls(**_known(cls, {**meant, **written, **options}))


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`"peri(step=0.1)"` → `("peri", {"step": 0.1})`; nothing is evaluated.

    Values are Python literals, words such as sqrt or decay-first, and multiples of pi.
    """
    name, bracket, _ = spec.strip().partition("(")
    if not bracket:
        return name, {}
    problem = NormLabError(f"cannot read scheme {spec!r}; expected e.g. peri(step=0.1) or geonorm(decay='sqrt')")
    try:
        call = ast.parse(f"f({spec.strip()[len(name) + 1 :]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise problem
        return name.strip(), {_keyword(k, problem): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise problem from None


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


@cache
def _load_plugins() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        register(point.load())


for _cls in (
    DeepNorm, Dual, GeoNorm, Hybrid, Keel, LayerScale, LNS, Mix, NGPT, NoNorm, Output, Peri, Post, Pre, SpanNorm,
):  # fmt: skip
    register(_cls)
