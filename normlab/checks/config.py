"""Configuration of a check: its ladders, its training burst, its time budget, and the findings it fails on.

Free of torch: the command line shows these fields in its help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from tyro.constructors import PrimitiveConstructorSpec

from normlab.errors import NormLabError, unknown
from normlab.models.config import PRESETS

Dtype = Literal["fp32", "bf16", "fp16"]


def _whole(word: str) -> int | str:
    """A whole number; any other word as it is, which the check of the field then names in one line."""
    return int(word) if word.lstrip("+-").isdecimal() else word


def _listed(of: Callable[[str], Any], example: str) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """One word with commas on the command line, so that a list does not swallow what follows it."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=example,
        instance_from_str=lambda words: tuple(of(part.strip()) for part in words[0].split(",") if part.strip()),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


_Depths = Annotated[tuple[int, ...], _listed(_whole, "6,12,24,48")]
_Widths = Annotated[tuple[int, ...], _listed(_whole, "32,64,128")]
_Findings = Annotated[tuple[str, ...], _listed(str, "FINDING,FINDING")]


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """One check."""

    depths: _Depths | None = None
    """Blocks of the models of the depth ladder: 6,12,24,48; none: doublings up to the target's own depth."""
    steps: int = 30
    """Optimiser steps of the training burst."""
    lr: float | Literal["auto"] = "auto"
    """Learning rate of the burst; auto: 1e-3 for schemes, for others 0.8 % of their weights' size, at most 1e-3."""
    seeds: int = 1
    """Models of every kind, each with weights and batches of its own."""
    dtype: Dtype = "fp32"
    """Number format to compute in."""
    device: str = "cpu"
    """Where to compute: cpu, cuda."""

    data: str = "bigram"
    """What the burst trains on: random tokens, a bigram language, or a text file."""
    length: int = 48
    """Tokens a sequence."""
    batch_size: int = 8
    """Sequences a step."""
    width: int | None = None
    """Width to build at; none: the target's own, for a scheme 64."""
    shrink: int | None = None
    """Divide widths, heads and vocabulary by this, so that a large model can be screened on a CPU."""
    weights: bool = False
    """Load published weights in place of random ones."""
    blocks: str | None = None
    """Which modules are the blocks, e.g. 'model.layers.*', where they are not found."""

    start_size: str = "125m"
    """Preset at which the start of a scheme is measured, which has no size of its own: tiny, 125m, 350m, 1.3b; none:
    no start is measured, of any target."""

    lr_ladder: bool = False
    """Also train at eight rates from 1e-4 to 3e-1, beside a Pre-Norm twin: usable range, largest stable rate."""
    reference_loss: float | None = None
    """Loss that a usable rate is held against, in place of the best of target and twin."""
    width_ladder: bool = False
    """Also look at other widths: half and twice the target's own, unless widths names some."""
    widths: _Widths = ()
    """Widths of the width ladder, which naming some asks for."""
    step_ladder: bool = False
    """Also look at smaller and larger residual steps Δt, where the design has one."""

    max_seconds: float = 60.0
    """Time for each ladder; where it is short, sizes between the smallest and the target's own are left out, and the
    result says so."""
    fail_on: _Findings = (
        "exploding", "vanishing", "collapse", "certificate", "untrained", "leaks", "structure", "start",
    )  # fmt: skip
    """Findings or verdicts that, where they fail, make the exit code 1; with :warn where they warn, too."""

    def __post_init__(self) -> None:
        from normlab.checks.judge.fail_on import parse

        for name in ("depths", "widths"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "fail_on", parse(self.fail_on))
        _check_counts("depths", self.depths, 2)
        _check_counts("widths", self.widths, 1)
        for name, least in (("steps", 1), ("seeds", 1), ("length", 2), ("batch_size", 1), ("width", 1), ("shrink", 1)):
            self._check_whole(name, least)
        for name in ("lr", "reference_loss", "max_seconds"):
            self._check_positive(name)
        if self.start_size not in (*PRESETS, "none"):
            raise unknown("start size", self.start_size, (*PRESETS, "none"))
        if self.dtype not in get_args(Dtype):
            raise unknown("number format", str(self.dtype), get_args(Dtype))

    @property
    def wants_widths(self) -> bool:
        return self.width_ladder or bool(self.widths)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `CheckConfig(**d)` reads them back."""
        return dataclasses.asdict(self)

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise NormLabError(f"check: {name} must be a whole number from {least} on, got {value}")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value not in (None, "auto") and not (isinstance(value, int | float) and 0.0 < value < math.inf):
            raise NormLabError(f"check: {name} must be a positive number, got {value}")


def _check_counts(name: str, values: Sequence[int] | None, least: int) -> None:
    if values is None:
        return
    if any(not isinstance(value, int) or value < least for value in values) or len(set(values)) < len(values):
        listed = ",".join(map(str, values))
        raise NormLabError(f"check: {name} must be different whole numbers from {least} on, got {listed}")
    if name == "depths" and not values:
        raise NormLabError("check: depths must name at least one depth, e.g. 6,12,24,48")
