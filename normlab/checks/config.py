"""CheckConfig: depth, width, step and learning-rate ladders, training steps, time budget and failing verdicts.

Does not import torch, because the command line shows these fields in its help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from normlab.errors import NormLabError, advice_for, unknown
from normlab.models.config import PRESETS
from normlab.utils.comma_lists import comma_list

Dtype = Literal["fp32", "bf16", "fp16"]


def _whole(word: str) -> int | str:
    """Parse an integer; return any other text unchanged, so that the field's own check reports it."""
    return int(word) if word.lstrip("+-").isdecimal() else word


_Depths = Annotated[tuple[int, ...], comma_list(_whole, "6,12,24,48")]
_Widths = Annotated[tuple[int, ...], comma_list(_whole, "32,64,128")]
_Findings = Annotated[tuple[str, ...], comma_list(str, "FINDING,FINDING")]

_LEAST = {
    "steps": 1, "seeds": 1, "length": 2, "batch_size": 1, "width": 1, "shrink": 1, "base_dim": 1, "base_depth": 1,
}  # fmt: skip
"""Smallest value of each option that is a whole number."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Options of one check."""

    depths: _Depths | None = None
    """Depths to build, in blocks, e.g. 6,12,24,48; none: doublings up to the target's own depth."""
    steps: int | None = None
    """Number of training steps at each size (the burst); none: 30, and 8 for a coordinate check."""
    lr: float | Literal["auto"] = "auto"
    """Learning rate; auto: 1e-3 for schemes, for other targets 0.8 % of the RMS of their weights, at most 1e-3."""
    seeds: int = 1
    """Number of seeds. Each seed has its own weights and batches."""
    dtype: Dtype = "fp32"
    """Floating-point type."""
    device: str = "cpu"
    """Device: cpu, cuda."""

    data: str = "bigram"
    """Training data: random tokens, a bigram language, or a text file."""
    length: int = 48
    """Sequence length in tokens."""
    batch_size: int = 8
    """Sequences per step."""
    width: int | None = None
    """Width of the models; none: the target's own, or 64 for a scheme."""
    shrink: int | None = None
    """Divide widths, heads and vocabulary by this factor, to check a large model on a CPU."""
    weights: bool = False
    """Load pretrained weights instead of random ones."""
    blocks: str | None = None
    """Pattern of the block modules, e.g. 'model.layers.*', if they are not found automatically."""

    start_size: str = "125m"
    """Preset at which the initial loss of a scheme is measured (a scheme has no size): tiny, 125m, 350m, 1.3b;
    none: skip the measurement for any target."""

    lr_ladder: bool = False
    """Also train at eight learning rates from 1e-4 to 3e-1, with a Pre-Norm twin: usable range, largest stable rate."""
    reference_loss: float | None = None
    """Reference loss of a usable learning rate; none: the best of target and twin."""
    width_ladder: bool = False
    """Also measure other widths: half and twice the target's own, or those of widths."""
    widths: _Widths = ()
    """Widths of the width ladder; giving some enables it."""
    step_ladder: bool = False
    """Also measure smaller and larger residual steps Δt, if the design has a step."""

    coordinates: bool = False
    """Run a coordinate check instead of the other tests:
    how activations, and their changes in the first training steps, depend on width and depth.
    It takes at least three seeds. --widths and --depths set the sizes."""
    base_dim: int | None = None
    """Coordinate check with the transfer rules of normlab train --base-dim."""
    base_depth: int | None = None
    """Coordinate check with the transfer rules of normlab train --base-depth."""

    max_seconds: float = 60.0
    """Time limit of each ladder in seconds; if it is short,
    sizes between the smallest and the target's own are skipped, and the result says so."""
    fail_on: _Findings = (
        "exploding", "vanishing", "collapse", "certificate", "untrained", "leaks", "structure", "start",
    )  # fmt: skip
    """Findings or verdicts whose failure sets the exit code to 1; with :warn, warnings count, too."""

    def __post_init__(self) -> None:
        from normlab.checks.judge.fail_on import parse

        for name in ("depths", "widths"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "fail_on", parse(self.fail_on))
        _check_counts("depths", self.depths, 2)
        _check_counts("widths", self.widths, 1)
        for name, least in _LEAST.items():
            self._check_whole(name, least)
        self._check_combination()
        for name in ("lr", "reference_loss", "max_seconds"):
            self._check_positive(name)
        if self.start_size not in (*PRESETS, "none"):
            raise unknown("start size", self.start_size, (*PRESETS, "none"))
        if self.dtype not in get_args(Dtype):
            raise unknown("number format", str(self.dtype), get_args(Dtype))

    @property
    def burst_steps(self) -> int:
        """Number of training steps, by default that of the kind of check."""
        return self.steps or (8 if self.coordinates else 30)

    @property
    def wants_widths(self) -> bool:
        return self.width_ladder or bool(self.widths)

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of plain values; `CheckConfig(**d)` restores it."""
        return dataclasses.asdict(self)

    def _check_combination(self) -> None:
        """Raise for options that only the other kind of check has, or that need one that is missing."""
        if not self.coordinates and (self.base_dim or self.base_depth):
            raise NormLabError("check: base_dim and base_depth are options of a coordinate check; add --coordinates")
        for name in ("lr_ladder", "width_ladder", "step_ladder"):
            if self.coordinates and getattr(self, name):
                raise NormLabError(
                    f"check: a coordinate check has no {name}; leave it out, or run it without coordinates"
                )
        if self.reference_loss is not None and not self.lr_ladder:
            raise NormLabError("check: reference_loss is an option of the learning-rate ladder; add --lr-ladder")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise NormLabError(
                f"check: {name} must be a whole number from {least} on, got {value}; {advice_for(self, name)}"
            )

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value not in (None, "auto") and not (isinstance(value, int | float) and 0.0 < value < math.inf):
            raise NormLabError(f"check: {name} must be a positive number, got {value}; {advice_for(self, name)}")


_EXAMPLES = {"depths": "6,12,24,48", "widths": "64,128"}


def _check_counts(name: str, values: Sequence[int] | None, least: int) -> None:
    if values is None:
        return
    if any(not isinstance(value, int) or value < least for value in values) or len(set(values)) < len(values):
        listed = ",".join(map(str, values))
        raise NormLabError(
            f"check: {name} must be different whole numbers from {least} on, got {listed}; try {_EXAMPLES[name]}"
        )
    if name == "depths" and not values:
        raise NormLabError(f"check: depths must name at least one depth; try {_EXAMPLES[name]}")
