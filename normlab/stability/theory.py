"""What theory says of a model beside what was measured: predicted laws, certificates, slopes, the scale test.

The records are plain numbers. Where the scheme is known all of it is filled in; of a foreign model the slopes that can
be read from its weights, and the scale test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from normlab.errors import NormLabError
from normlab.records import from_plain, to_plain
from normlab.stability.blame import blame
from normlab.stability.laws import power_law
from normlab.stability.profile import Number, Profile
from normlab.stability.verdict import Verdict, unmeasured

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from normlab.stability.targets.base import Target
    from normlab.stack import Stack

Numbers = tuple[Number, ...]

Kind = Literal["resets", "keeps", "adds", "multiplies", "unbounded"]
"""What a block does to the bound of the state: forgets it, leaves it, adds to it, multiplies it, or has none."""

_NOTHING = 1e-30
_TRIFLE = 0.05
"""An exponent that is no growth to speak of: 20 % over 48 blocks."""

ScaleFinding = Literal["scale-free", "partly normalised", "proportional", "not measured"]
"""How a branch's gradient follows the size of its last matrix."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring blocks that do the same to the bound."""

    first: int
    last: int
    kind: Kind
    words: str


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Λ_k ∝ (k + 1)^exponent over the blocks, with its interval."""

    exponent: float
    low: Number = None
    high: Number = None

    @property
    def grows(self) -> bool:
        """Whether later blocks have larger slopes, beyond doubt and by more than a trifle."""
        return self.low is not None and self.low > 0.0 and self.exponent > _TRIFLE


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Λ_k of one branch in every block: the largest RMS that it can return for a normalised input."""

    branch: str
    """Which of a block's branches."""
    values: Numbers
    trend: Trend | None = None


@dataclass(frozen=True, kw_only=True)
class TheoryLook:
    """Theory at one snapshot: certificates read weights and gains as they are."""

    step: int
    certificate: Numbers = ()
    """Proven bound on the RMS at each boundary; None where there is none, empty where nothing is known."""
    used: Numbers = ()
    """RMS over all tokens, measured with these weights, over the bound."""
    used_by_largest: Numbers = ()
    """RMS of the largest token over the bound: above one the certificate is violated."""
    slopes: tuple[Slope, ...] = ()
    drift: Number = None
    """Largest relative change of a token's length, where the scheme keeps it; None elsewhere."""
    clamped: Numbers = ()
    """Share of tokens whose angle was clamped, for each block; empty where nothing clamps."""

    @property
    def use(self) -> Number:
        """The share of the bound that is used after the last block."""
        return self.used[-1] if self.used else None


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """The scale test of one branch."""

    block: int
    branch: str
    """Path of the last matrix, inside the block."""
    gain: Number = None
    """‖Jᵀv‖ / ‖v‖ of the branch alone, as it is."""
    factors: tuple[float, ...]
    """What the matrix was multiplied by."""
    gains: Numbers
    """The same at each factor, with the state enlarged where it is small."""
    slope: Number
    """Of log gain on log factor."""
    finding: ScaleFinding


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Everything that theory says of one model."""

    scheme: str | None = None
    """The scheme with its options; None where it is not known."""
    depth: int
    """Blocks of the model that was looked at."""

    growth: str | None = None
    """Predicted class of the forward pass: bounded, random walk, linear or exponential in RMS."""
    forward: str = ""
    """The predicted forward law in words."""
    predicted: Numbers = ()
    """RMS that the law predicts at each boundary at initialisation; empty where no law is stated."""
    backward: str = ""
    """The predicted law of the gradient in words."""

    certificate: str = ""
    """What is proven of the state, in words; says so where nothing is."""
    segments: tuple[Segment, ...] = ()
    slack: float = 0.0
    """Relative excess over a bound that rounding alone can make."""
    before: TheoryLook | None = None
    after: TheoryLook | None = None
    slopes: str = ""
    """What the slopes do over depth and over the burst, in words."""

    scale_test: tuple[ScaleRow, ...] = ()
    scale: str = ""
    """What the scale test found, in words."""

    notes: tuple[str, ...] = ()
    """What could not be computed, and why."""

    @property
    def looks(self) -> tuple[TheoryLook, ...]:
        return tuple(look for look in (self.before, self.after) if look is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Theory:
        """The theory that `to_dict` wrote."""
        return from_plain(cls, record, "theory")

    def verdicts(self) -> list[Verdict]:
        """What fails loudly: a state above its bound, a length that drifts where the scheme keeps it."""
        drifts = [look.drift for look in self.looks if look.drift is not None]
        return [self._certificate_verdict(), *([self._drift_verdict(max(drifts))] if drifts else [])]

    def _certificate_verdict(self) -> Verdict:
        if not any(look.certificate for look in self.looks):
            return unmeasured("certificate", self.certificate or "the scheme is not known")
        worst = max(self.looks, key=lambda look: _largest(look.used_by_largest) or 0.0)
        share = _largest(worst.used_by_largest)
        if share is None:
            return Verdict(name="certificate", finding="none", level="ok", words=self.certificate)
        limit = 1.0 + self.slack
        layers = tuple(place - 1 for place, x in enumerate(worst.used_by_largest) if x is not None and x > limit)
        uses = [f"{look.use:.0%} of the bound at step {look.step}" for look in self.looks if look.use is not None]
        kept = f"after the last block {', '.join(uses) or 'nothing is proven'}; {self.certificate}"
        broken = f"the largest token is {share:.6g} times its bound at step {worst.step}, a bug in model or certificate"
        return Verdict(
            name="certificate",
            finding="certificate violated" if layers else "kept",
            level="fail" if layers else "ok",
            value=share,
            threshold=limit,
            layers=layers,
            words=f"{broken}{blame(layers, self.depth)}" if layers else kept,
        )

    def _drift_verdict(self, drift: float) -> Verdict:
        over = drift > self.slack
        words = f"a token's length changes by up to {drift:.2g} of itself ({self.slack:.2g} is what rounding can make)"
        return Verdict(
            name="norm drift",
            finding="norm drift" if over else "fine",
            level="fail" if over else "ok",
            value=drift,
            threshold=self.slack,
            words=words,
        )


def theory(target: Target, model: nn.Module, profile: Profile, *, before: Theory | None = None) -> Theory:
    """Theory beside a profile, with the model's weights as they are now; `before`: what it was before the burst.

    One batch of the target goes through the model, which is left as it was. The scale test is made once.
    """
    from normlab.stability.certificates import find_stack
    from normlab.stability.replay import at_rest

    batch = next(iter(target.batches(profile.seed)))
    stack, run = find_stack(model), lambda: target.loss(model, batch)
    with at_rest(model):
        found = _scheme_theory(model, stack, run, profile) if stack else _foreign_theory(model, target.blocks, profile)
        if before is None:
            found = _with_scale_test(found, model, target.blocks, run)
    if before is not None:
        kept = {name: getattr(before, name) for name in ("before", "scale_test", "scale", "predicted", "notes")}
        found = dataclasses.replace(found, **kept, after=found.before, slack=max(before.slack, found.slack))
    return dataclasses.replace(found, slopes=_slope_words(found))


def _scheme_theory(model: nn.Module, stack: Stack, run: Callable[[], Any], profile: Profile) -> Theory:
    from normlab.stability.certificates import certify, entry_bound, observe

    seen = observe(stack, run)
    proven = certify(stack, entry_bound(model, seen.entry))
    look = TheoryLook(
        step=profile.step,
        certificate=_plain(proven.curve),
        used=_shares(seen.pooled, proven.curve),
        used_by_largest=_shares(seen.largest, proven.curve),
        slopes=_slopes(proven.slopes),
        drift=None if seen.drift is None else _plain([seen.drift])[0],
        clamped=_plain(seen.clamped),
    )
    return Theory(
        scheme=str(stack.scheme),
        depth=len(stack.layers),
        certificate=proven.words,
        segments=proven.segments,
        slack=seen.slack,
        before=look,
        **_law(stack, profile.rms[0], proven.segments),
    )


def _law(stack: Stack, entry: Number, segments: Sequence[Segment]) -> dict[str, Any]:
    """What the scheme's law says, for an entry of this RMS."""
    bound = stack.bound
    try:
        law = bound.law()
    except NormLabError as error:
        return {"notes": (str(error),)}
    sizes = [law.rms(round(bound.branches * place / bound.scheme.cut)) for place in range(bound.depth + 1)]
    growth = law.forward if law.forward == "bounded" else f"up to {law.forward} in training"
    start = f"at initialisation RMS × {sizes[-1]:.3g} over {bound.depth} blocks"
    start += ", if branches return the RMS they are given"
    return {
        "growth": law.forward,
        "forward": f"{growth}; {start}" + (f"; {law.note}" if law.note else ""),
        "backward": law.backward,
        "predicted": () if entry is None else _plain(_predicted(stack, sizes, entry, segments)),
    }


def _predicted(stack: Stack, sizes: Sequence[float], entry: float, segments: Sequence[Segment]) -> Iterator[float]:
    """The law's sizes, which are for an entry of RMS 1, for one of another: what adds to a state adds to its square,
    and what resets it forgets the entry.
    """
    from normlab.stability.certificates import keeps_norm

    yield entry
    for segment in segments:
        if segment.kind == "resets" and not keeps_norm(stack):
            entry = stack.scheme.new_norm(stack.dim).core_bound(math.inf)
        for size in sizes[segment.first + 1 : segment.last + 2]:
            adds = segment.kind == "adds"
            yield math.hypot(entry, math.sqrt(max(size**2 - 1.0, 0.0))) if adds else entry * size


def _foreign_theory(model: nn.Module, pattern: str | None, profile: Profile) -> Theory:
    from normlab.stability.blocks import find_stacks
    from normlab.stability.constants import slopes_by_role

    blocks = find_stacks(model, pattern)[0].blocks
    try:
        found = [slopes_by_role(block) for block in blocks]
    except NormLabError as error:
        look, notes = TheoryLook(step=profile.step), (f"no slopes from the weights: {error}",)
        return Theory(depth=len(blocks), before=look, notes=notes)
    names = [name for name in found[0] if all(name in slopes for slopes in found)]
    slopes = _slopes({name: [slopes[name] for slopes in found] for name in names})
    return Theory(depth=len(blocks), before=TheoryLook(step=profile.step, slopes=slopes))


def _with_scale_test(found: Theory, model: nn.Module, pattern: str | None, run: Callable[[], Any]) -> Theory:
    from normlab.stability.blocks import find_stacks
    from normlab.stability.scale_test import scale_test, summary

    stacks = find_stacks(model, pattern)
    rows: list[ScaleRow] = []
    for stack in stacks:
        prefix = f"{stack.name}: " if len(stacks) > 1 else ""
        rows += [dataclasses.replace(row, branch=prefix + row.branch) for row in scale_test(model, stack, run)]
    return dataclasses.replace(found, scale_test=tuple(rows), scale=summary(rows))


def _slopes(found: Mapping[str, Sequence[float]]) -> tuple[Slope, ...]:
    return tuple(Slope(branch=name, values=_plain(values), trend=_trend(values)) for name, values in found.items())


def _trend(values: Sequence[float]) -> Trend | None:
    if len(values) < 3 or not all(math.isfinite(value) and value > 0.0 for value in values):
        return None
    fit = power_law(range(1, len(values) + 1), values)
    return Trend(exponent=fit.exponent, low=fit.low, high=fit.high)


def _slope_words(found: Theory) -> str:
    """One clause a branch: how its slope depends on depth, and what the burst did to it."""
    latest = found.after or found.before
    first = {slope.branch: slope for slope in found.before.slopes} if found.before else {}
    return "; ".join(_one_slope(slope, first.get(slope.branch)) for slope in latest.slopes) if latest else ""


def _one_slope(slope: Slope, first: Slope | None) -> str:
    middle = _mean(slope.values)
    words = f"{slope.branch}: Λ {middle:.3g} on average" if middle is not None else f"{slope.branch}: no Λ"
    if slope.trend is not None:
        span = "" if slope.trend.low is None else f" [{slope.trend.low:z.2f}, {slope.trend.high:z.2f}]"
        rises = "grows" if slope.trend.grows else "does not grow"
        words += f", {rises} with depth (exponent {slope.trend.exponent:z.2f}{span})"
    start = _mean(first.values) if first and first is not slope else None
    return f"{words}, {middle / start:.2f} times its start after the burst" if start and middle else words


def _mean(values: Numbers) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _plain(values: Iterable[float]) -> Numbers:
    return tuple(value if math.isfinite(value) else None for value in values)


def _shares(sizes: Sequence[float], bounds: Sequence[float]) -> Numbers:
    """size / bound; None where there is no bound."""
    # A bound of zero is one, too: any state above it uses far more than all of it.
    pairs = zip(sizes, bounds, strict=True)
    return _plain(size / max(bound, _NOTHING) if math.isfinite(bound) else math.nan for size, bound in pairs)


def _largest(values: Numbers) -> Number:
    return max((value for value in values if value is not None), default=None)
