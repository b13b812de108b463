"""Records of the ladders beside that of depth: width, residual step, learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.stability.profile import Ladder, Number


@dataclass(frozen=True, kw_only=True)
class Width:
    """One rung of the width ladder."""

    width: int
    ladder: Ladder


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at a rung, in three numbers."""

    rms: Number = None
    """Of the last state, mean over seeds."""
    G: Number = None
    """‖g_1‖ / ‖g_L‖, geometric mean over seeds."""
    loss: Number = None
    """Nats per token, mean over seeds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rung of the residual-step ladder: the same design with step Δt."""

    step: float
    depth: int
    before: Look
    after: Look


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The design that a lone target is measured beside."""

    name: str
    losses: tuple[Number, ...]


@dataclass(frozen=True, kw_only=True)
class RateLadder:
    """Losses over learning rates, and what they mean against the reference."""

    depth: int
    """Blocks of the models."""
    steps: int
    """Steps at each rate."""
    rates: tuple[float, ...]
    losses: tuple[Number, ...]
    """ℓ(η); None where the run broke or rose above 20."""
    start: float
    """ℓ₀."""
    twin: Twin | None = None
    reference: float
    """ℓ_ref."""
    reference_from: str
    """Whose loss that is."""
    usable: tuple[float, float] | None
    """The longest range of usable rates; None where there is none."""
    decades: float
    """Its width."""
    sens: float
    """Mean over the rates of min(ℓ(η), ℓ₀) - ℓ_ref."""
    lr_max: float | None
    """The largest stable rate; None where no rate gave a loss below that of step 0."""
