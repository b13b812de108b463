"""Is the gap at the target identified? If one of eight reasons speaks against it, that is shown and no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from normlab.ladders.statistics.answer import HeldOut, Identified, Obstacle, Place, Projection, Reason
from normlab.ladders.statistics.cells import MeanLoss
from normlab.ladders.statistics.estimators.fit import Sample
from normlab.ladders.statistics.estimators.layout import SAME, HasPlace, layout_of, unvaried
from normlab.ladders.statistics.forms import fit_forms, opposite_signs
from normlab.utils.text import counted

FEWEST_RUNGS = 4
FEWEST_SIDE = 3
"""Sizes and budgets of a grid."""
SMALLEST_SPAN = 30.0
LARGEST_RATIO = 4.0
_SIDES = {"size": "size", "tokens": "the number of tokens"}


@dataclass(frozen=True, kw_only=True)
class EdgeRate:
    """A learning rate that was picked at the edge of those tried: a better one may lie beyond."""

    scheme: str
    size: str
    lr: float
    tokens: int | None = None

    @property
    def text(self) -> str:
        return f"the rate {self.lr:g} that {self.scheme} picked at {self.size} is at the edge of those tried"


def identify(
    sample: Sample,
    places: Sequence[Projection],
    targets: Sequence[Projection],
    baseline: Sequence[MeanLoss],
    held_out: Sequence[HeldOut],
    edges: Sequence[EdgeRate],
) -> Identified:
    """Look for all reasons at every place; the answer as a whole depends on those at the targets among them."""
    reasons = obstacles_of_design(sample.places, [own.place for own in places])
    for own in places:
        reasons += _wide_interval(sample, own)
        reasons += _forms_disagree(sample, own, baseline)
    reasons += [
        Obstacle(
            rule="missed forecast",
            text=f"the result at {own.place.name} fell outside the forecast that was made before it",
        )
        for own in held_out
        if own.is_hit is False
    ]
    reasons += [Obstacle(rule="rate at edge", text=edge.text) for edge in edges]
    asked = (None, *(target.place.name for target in targets))
    identified = not any(reason.target in asked for reason in reasons)
    return Identified(is_identified=identified, reasons=sorted(reasons, key=_place_in_order))


def not_fitted(text: str, rule: Reason = "small ladder") -> Identified:
    """The answer for a scheme without a fit: not identified, for one reason."""
    return Identified(is_identified=False, reasons=[Obstacle(rule=rule, text=text)])


def obstacles_of_design(cells: Sequence[HasPlace], targets: Sequence[Place]) -> list[Obstacle]:
    """The reasons that are known before anything is trained."""
    found = [*_small_ladder(cells)]
    for place in targets:
        found += _never_varied(cells, place) or _other_tokens_per_parameter(cells, place)
    return found


def _place_in_order(reason: Obstacle) -> int:
    return get_args(Reason).index(reason.rule)


def _wide_interval(sample: Sample, target: Projection) -> list[Obstacle]:
    largest = float(abs(sample.means).max())
    if target.gap.width <= 2.0 * largest:
        return []
    text = f"the interval at {target.place.name} is {target.gap.width:.3f} wide"
    told = f"{text}, more than twice the largest gap measured ({largest:.3f})"
    return [Obstacle(rule="wide interval", text=told, target=target.place.name)]


def _forms_disagree(sample: Sample, target: Projection, baseline: Sequence[MeanLoss]) -> list[Obstacle]:
    found = opposite_signs(fit_forms(sample, target.place, baseline))
    if found is None:
        return []
    below, above = found
    text = f"forms that the ladder does not reject disagree in sign at {target.place.name}"
    told = f"{text}: {below.name} {below.value:+.3f}, {above.name} {above.value:+.3f}"
    return [Obstacle(rule="forms disagree", text=told, target=target.place.name)]


def _small_ladder(cells: Sequence[HasPlace]) -> list[Obstacle]:
    reasons, layout = [], layout_of(cells)
    if layout.kind == "path":
        if layout.cells < FEWEST_RUNGS:
            reasons.append(f"{counted(layout.cells, 'rung')}, fewer than {FEWEST_RUNGS}")
    elif min(layout.sizes, layout.budgets) < FEWEST_SIDE:
        sides = f"{counted(layout.sizes, 'size')} and {counted(layout.budgets, 'budget')}"
        reasons.append(f"{sides}, fewer than {FEWEST_SIDE} of each")
    if layout.span < SMALLEST_SPAN:
        reasons.append(f"compute spans a factor {layout.span:.3g}, less than {SMALLEST_SPAN:g}")
    return [Obstacle(rule="small ladder", text=text) for text in reasons]


def _never_varied(cells: Sequence[HasPlace], place: Place) -> list[Obstacle]:
    """A place with another size than all cells, or with another budget: the ladder says nothing about that step."""
    top = max(cells, key=lambda at: at.flops)
    steps = {"size": place.parameters / top.parameters, "tokens": place.tokens / top.tokens}
    moved = [side for side in unvaried(cells) if not 1.0 / SAME <= steps[side] <= SAME]
    if not moved:
        return []
    text = f"{' and '.join(_SIDES[side] for side in moved)} {'was' if len(moved) == 1 else 'were'} never varied"
    step = " and ".join(f"{steps[side]:.3g} times the {side}" for side in moved)
    return [
        Obstacle(rule="never varied", text=f"{text} on this ladder, and {place.name} has {step}", target=place.name)
    ]


def _other_tokens_per_parameter(cells: Sequence[HasPlace], place: Place) -> list[Obstacle]:
    """The obstacle of a target whose tokens per parameter are far from those on the ladder's path."""
    layout = layout_of(cells, [place])
    if layout.kind == "grid" or layout.unvaried:
        return []
    # A step aside moves as much into tokens as out of size.
    off = math.exp(2.0 * abs(float(layout.aside[-1])))
    if off <= LARGEST_RATIO:
        return []
    text = f"{place.name} has tokens per parameter a factor {off:.3g} away from where the ladder's one path leads"
    return [Obstacle(rule="other tokens per parameter", text=text, target=place.name)]
