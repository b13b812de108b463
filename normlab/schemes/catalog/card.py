"""The card of a scheme: formula, source, options, parameters, cost and bounds on one page.

The docstring of a scheme holds what cannot be computed (formula, sketch, source, known failures). The rest is computed
from the scheme itself, so that terminal, documentation and code cannot disagree.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from normlab.errors import NormLabError
from normlab.schemes.contract.bounds import rms_bound_of, unbounded
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.scheme import Scheme
from normlab.utils.docstrings import field_docs

SECTIONS = ("Formula", "Placement", "Init", "Source", "Law", "Fails")
_DEPTH, _DIM = 12, 768
"""Depth and width for the numbers on a card: those of a 125M model."""


@dataclass(frozen=True)
class Option:
    """One option of a scheme."""

    name: str
    default: Any
    help: str


@dataclass(frozen=True)
class Card:
    """The content of `normlab schemes NAME` and of `docs/schemes/NAME.md`."""

    scheme: Scheme
    title: str
    summary: str
    sections: dict[str, str]

    @classmethod
    def of(cls, scheme: Scheme) -> Card:
        """Parse the docstring; a scheme with a plain docstring or none gets a card with what is there."""
        head, _, body = _docstring(scheme).partition("\n")
        title, colon, summary = head.partition(": ")
        if not colon:
            # A plain sentence is a summary, not a title.
            title, summary = scheme.name, head
        return cls(scheme, title, summary, dict(_split(body)))

    @property
    def options(self) -> list[Option]:
        """The scheme's own options first, then those that all schemes share."""
        shared = set(Scheme.options())
        fields = self.scheme.options().values()
        texts = field_docs(type(self.scheme))
        listed = [Option(f.name, f.default, texts.get(f.name, "")) for f in fields if f.name != "cut"]
        return sorted(listed, key=lambda option: option.name in shared)

    @property
    def extra_params(self) -> ParamFormula:
        """Number of parameters that the scheme adds to the sublayers' own."""
        return ParamFormula.of(self.scheme)

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Memory traffic of a fused block around its sublayers, in vectors per token: (forward, backward).

        None for a user's block that is not made of steps.
        """
        middle = self.scheme.bind(depth=_DEPTH, dim=8).block(_DEPTH // 2)
        if not hasattr(middle, "steps"):
            return None
        moves: list[tuple[int, int]] = [step.traffic(self.scheme.streams) for step in middle.steps]  # pyright: ignore
        return sum(forward for forward, _ in moves), sum(backward for _, backward in moves)

    @property
    def cost(self) -> str:
        """The memory traffic in words."""
        if self.traffic is None:
            return "not known: its block is not made of steps"
        forward, backward = self.traffic
        size = (forward + backward) * _DIM * 2
        return (
            f"{forward} + {backward} vectors a token and block, forward + backward, when fused: "
            f"{size:,} bytes at d = {_DIM} in bf16"
        )

    @property
    def certificate(self) -> str:
        """The proven bound on the RMS of the state at initialisation, for any sublayers."""
        bound = self.scheme.bind(depth=_DEPTH, dim=_DIM)
        size = rms_bound_of(bound.entry(), 1.0)
        for k in range(_DEPTH):
            size = bound.block(k).rms_bound(size, [unbounded] * bound.branches)
        if size == float("inf"):
            return (
                "none without a bound on the weights: if they grow with depth, the state grows faster than said above"
            )
        return f"RMS ≤ {size:.4g} after {_DEPTH} blocks at initialisation, whatever the sublayers do"

    @property
    def growth(self) -> list[tuple[str, str]]:
        """The scheme's growth laws in words; empty if it states none."""
        try:
            law = self.scheme.law(_DEPTH)
        except NormLabError:
            return []
        rows = [("Forward", law.forward + _start(law)), ("Backward", law.backward)]
        return [*rows, ("Note", law.note)] if law.note else rows


def _docstring(scheme: Scheme) -> str:
    """The docstring of the class; empty if it is only the signature that a dataclass generates."""
    text = inspect.cleandoc(type(scheme).__doc__ or "")
    return "" if text.startswith(f"{type(scheme).__name__}(") else text


def _start(law: Law) -> str:
    """The predicted RMS of the state at initialisation."""
    if law.rms is None:
        return ""
    sizes = ", ".join(f"{law.rms(i):.3g} after {i}" for i in (24, 48))
    return f"; at initialisation RMS × {sizes} sublayers"


def _split(body: str) -> Iterator[tuple[str, str]]:
    """(section, text) pairs; a section begins with its name in the first column, its text is indented."""
    pattern = re.compile(rf"^({'|'.join(SECTIONS)})\s+", re.MULTILINE)
    starts = list(pattern.finditer(body))
    for here, following in itertools.pairwise([*starts, None]):
        assert here is not None
        text = body[here.end() : following.start() if following else None].rstrip()
        # The name takes the place of the first line's indent; the other lines have an indent of the same length.
        yield here.group(1), textwrap.dedent(" " * (here.end() - here.start()) + text)


@dataclass(frozen=True)
class ParamFormula:
    """(p·L + q)·d² + (a·L + b)·d + c·L + e parameters for L blocks of width d."""

    a: int
    b: int
    c: int
    e: int
    p: int = 0
    q: int = 0

    @classmethod
    def of(cls, scheme: Scheme) -> ParamFormula:
        """Solve for the coefficients from six small stacks; not of one block, which may be an exception."""
        (p, a, c), (q, b, e) = _line([_parabola([_count(scheme, L, d) for d in (1, 2, 3)]) for L in (4, 5)], start=4)
        return cls(int(a), int(b), int(c), int(e), int(p), int(q))

    def at(self, depth: int, dim: int) -> int:
        """The number of parameters at a depth and width."""
        squares = self.p * depth + self.q
        return squares * dim**2 + (self.a * depth + self.b) * dim + self.c * depth + self.e

    def __str__(self) -> str:
        squares, widths = _polynomial(self.p, self.q), _polynomial(self.a, self.b)
        scalars = _polynomial(self.c, self.e)
        terms = [_times(squares, "d²"), _times(widths, "d"), scalars if scalars != "0" else ""]
        return " + ".join(term for term in terms if term) or "none"


def _line(values: list[Any], start: int = 1) -> Any:
    """(slope, intercept) through the values at `start` and `start` + 1."""
    at_start, slope = np.asarray(values[0]), np.asarray(values[1]) - np.asarray(values[0])
    return slope, at_start - start * slope


def _parabola(values: list[int]) -> tuple[int, int, int]:
    """(u, v, w) of u·d² + v·d + w through the values at d = 1, 2 and 3."""
    first, second, third = values
    square = (third - 2 * second + first) // 2
    slope = second - first - 3 * square
    return square, slope, first - slope - square


def _count(scheme: Scheme, depth: int, dim: int) -> int:
    bound = scheme.bind(depth=depth, dim=dim)
    modules = [bound.entry(), bound.exit(), *(bound.block(k) for k in range(depth))]
    return sum(p.numel() for module in modules for p in module.parameters())


def _times(count: str, unit: str) -> str:
    if count in ("0", "1"):
        return unit if count == "1" else ""
    return f"({count})·{unit}" if " " in count else f"{count}·{unit}"


def _polynomial(slope: int, constant: int) -> str:
    first = "" if slope == 0 else "L" if slope == 1 else f"{slope}L"
    if not first:
        return str(constant)
    return first if constant == 0 else f"{first} {'+' if constant > 0 else '−'} {abs(constant)}"
