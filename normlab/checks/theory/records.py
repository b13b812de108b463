"""Records of theory beside measurement, in plain numbers, and the verdicts on them.

Where the scheme is known all of it is filled in; of a foreign model the slopes that can be read from its weights, the
scale test and the Jacobians of its branches. `normlab.checks.theory.analysis.theory` fills them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from normlab.checks.judge.blame import blame
from normlab.checks.judge.verdict import Level, Verdict, unmeasured
from normlab.probes.profile import Number
from normlab.utils.records import from_plain, to_plain

Numbers = tuple[Number, ...]

Kind = Literal["resets", "keeps", "adds", "multiplies", "unbounded"]
"""How a block changes the bound of the state: resets it, keeps it, adds to it, multiplies it, or has no bound."""

MIXING_WARN, MIXING_FAIL = 10.0, 1000.0
"""Gains of mixing through depth: mHC stays below 1.6 at 27B, hyper-connections reached 3000 when their loss surged."""

_TRIFLE = 0.05
"""Exponents below this are not reported as growth: 20 % over 48 blocks."""

ScaleFinding = Literal["scale-free", "partly normalised", "proportional", "not measured"]
"""How the gradient of a branch scales with its last matrix."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring blocks that change the bound in the same way."""

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
        """Whether later blocks have significantly and noticeably larger slopes."""
        return self.low is not None and self.low > 0.0 and self.exponent > _TRIFLE


@dataclass(frozen=True, kw_only=True)
class GradientSlope:
    """Λ_k of one branch in every block: the largest RMS that it can return for a normalised input."""

    branch: str
    """Name of the branch in its block."""
    values: Numbers
    trend: Trend | None = None


@dataclass(frozen=True, kw_only=True)
class JacobianRow:
    """Largest factor by which one branch can multiply a gradient."""

    block: int
    branch: str
    """Path of the branch's last matrix; "block" for all that a block adds, where its skip is not the identity."""
    norm: Number
    """‖J‖, the largest singular value of the Jacobian of the increment with respect to the state."""


@dataclass(frozen=True, kw_only=True)
class TheoryLook:
    """Theory at one snapshot: certificates read weights and gains as they are."""

    step: int
    certificate: Numbers = ()
    """Proven bound on the RMS at each boundary; None without a bound, empty if the scheme is unknown."""
    used: Numbers = ()
    """Measured RMS over all tokens, divided by the bound."""
    used_by_largest: Numbers = ()
    """Measured RMS of the largest token, divided by the bound; above 1 the certificate is violated."""
    slopes: tuple[GradientSlope, ...] = ()
    jacobians: tuple[JacobianRow, ...] = ()
    """Jacobians of some blocks, at the states of a real forward pass."""
    log_gain: Number = None
    """Σ log χ of the gradient, measured over the blocks of `jacobians`; None if it cannot be compared."""
    log_gain_bound: Number = None
    """Upper bound of it: Σ log(1 + ‖J‖) over the same blocks."""
    drift: Number = None
    """Largest relative change of a token's length, if the scheme preserves it; else None."""
    clamped: Numbers = ()
    """Share of tokens whose angle was clamped, by block; empty if nothing clamps."""
    mixing_forward: Number = None
    """Largest row sum of the product of all mixing matrices; None if no streams are mixed."""
    mixing_backward: Number = None
    """Largest column sum of that product, the gain of gradients."""
    stream_spread: Number = None
    """RMS of the streams' distance from their mean over that of the streams, after the last block."""

    @property
    def use(self) -> Number:
        """The share of the bound that is used after the last block."""
        return self.used[-1] if self.used else None

    @property
    def mixing(self) -> Number:
        """The larger of the two gains of mixing."""
        return _largest((self.mixing_forward, self.mixing_backward))


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """The scale test of one branch."""

    block: int
    branch: str
    """Path of the branch's last matrix, inside the block."""
    gain: Number = None
    """‖Jᵀv‖ / ‖v‖ of the branch alone, unscaled."""
    factors: tuple[float, ...]
    """Factors on the matrix."""
    gains: Numbers
    """The same at each factor, with the state enlarged where it is small."""
    slope: Number
    """Slope of log gain on log factor."""
    finding: ScaleFinding


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Theory of one model: laws, certificates, slopes, scale test, Jacobians."""

    scheme: str | None = None
    """The scheme with its options; None if unknown."""
    depth: int
    """Number of blocks of the measured model."""

    growth: str | None = None
    """Predicted class of the forward pass: bounded, random walk, linear or exponential in RMS."""
    forward: str = ""
    """The predicted forward law in words."""
    predicted: Numbers = ()
    """Predicted RMS at each boundary at initialisation; empty without a law."""
    backward: str = ""
    """The predicted law of the gradient in words."""

    certificate: str = ""
    """The proven bound of the state in words, or that there is none."""
    segments: tuple[Segment, ...] = ()
    slack: float = 0.0
    """Relative excess over a bound that rounding alone can make."""
    before: TheoryLook | None = None
    after: TheoryLook | None = None
    slopes: str = ""
    """How slopes change over depth and in training, in words."""

    jacobians: str = ""
    """How far the gradient is below its bound from the branches, in words."""

    scale_test: tuple[ScaleRow, ...] = ()
    scale: str = ""
    """Result of the scale test, in words."""

    notes: tuple[str, ...] = ()
    """What could not be computed, with reasons."""

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
        """Verdicts: a state above its proven bound, a length that drifts, streams that mixing enlarges."""
        drifts = [look.drift for look in self.looks if look.drift is not None]
        mixed = [look for look in self.looks if look.mixing is not None]
        return [
            self._certificate_verdict(),
            *([self._drift_verdict(max(drifts))] if drifts else []),
            *([self._mixing_verdict(max(mixed, key=lambda look: look.mixing or 0.0))] if mixed else []),
        ]

    @property
    def _no_certificate(self) -> str:
        return "the scheme is not known" if self.scheme is None else "its layers do more to the state than the scheme"

    def _certificate_verdict(self) -> Verdict:
        if not any(look.certificate for look in self.looks):
            return unmeasured("certificate", self.certificate or self._no_certificate)
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

    def _mixing_verdict(self, worst: TheoryLook) -> Verdict:
        gain = worst.mixing or 0.0
        level: Level = "fail" if gain > MIXING_FAIL else "warn" if gain > MIXING_WARN else "ok"
        apart = "" if worst.stream_spread is None else f"; streams {worst.stream_spread:.2%} apart"
        words = (
            f"the product of all mixing matrices multiplies a stream by up to {worst.mixing_forward:.3g}, "
            f"a gradient by up to {worst.mixing_backward:.3g}, at step {worst.step}{apart}"
        )
        return Verdict(
            name="mixing",
            finding="fine" if level == "ok" else "mixing gain",
            level=level,
            value=gain,
            threshold=MIXING_FAIL if level == "fail" else MIXING_WARN,
            words=words,
        )


def _largest(values: Numbers) -> Number:
    return max((value for value in values if value is not None), default=None)
