"""Records of a check's ladders: profiles over depths, and the rungs over width, residual step and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from normlab.errors import NormLabError
from normlab.probes.profile import Number, Profile, When


@dataclass(frozen=True)
class Ladder:
    """Profiles of one design at several depths, before and after a burst, over seeds."""

    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "profiles", tuple(self.profiles))
        if not self.profiles:
            raise NormLabError("ladder: expected at least one profile, got none")
        keys = [(profile.depth, profile.when, profile.seed) for profile in self.profiles]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise NormLabError(f"ladder: two profiles of depth {twice[0]}, {twice[1]} training, seed {twice[2]}")

    @property
    def depths(self) -> tuple[int, ...]:
        """The measured depths, ascending."""
        return tuple(sorted({profile.depth for profile in self.profiles}))

    @property
    def snapshots(self) -> tuple[When, ...]:
        """The snapshots that exist: before, after, or both."""
        return tuple(when for when in get_args(When) if any(profile.when == when for profile in self.profiles))

    def at(self, depth: int, when: When) -> list[Profile]:
        """The profiles of one depth and one snapshot, by seed."""
        found = [profile for profile in self.profiles if (profile.depth, profile.when) == (depth, when)]
        return sorted(found, key=lambda profile: profile.seed)

    def deepest(self, when: When) -> list[Profile]:
        """The profiles of the largest depth at this snapshot."""
        return self.at(max(profile.depth for profile in self.profiles if profile.when == when), when)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"profiles": [profile.to_dict() for profile in self.profiles]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Ladder:
        """The ladder that `to_dict` wrote."""
        if "profiles" not in record:
            raise NormLabError("ladder: the record has no 'profiles'; expected what Ladder.to_dict writes")
        return cls(tuple(Profile.from_dict(profile) for profile in record["profiles"]))


@dataclass(frozen=True, kw_only=True)
class WidthRung:
    """One rung of the width ladder."""

    width: int
    ladder: Ladder


@dataclass(frozen=True, kw_only=True)
class Look:
    """Three numbers of one snapshot of a rung."""

    rms: Number = None
    """RMS of the last state, mean over seeds."""
    G: Number = None
    """Gradient ratio ‖g_1‖ / ‖g_L‖, geometric mean over seeds."""
    loss: Number = None
    """Loss in nats per token, mean over seeds."""


@dataclass(frozen=True, kw_only=True)
class StepRung:
    """One rung of the residual-step ladder: the same design with step Δt."""

    step: float
    depth: int
    before: Look
    after: Look


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The reference design that a single target is compared with."""

    name: str
    losses: tuple[Number, ...]


@dataclass(frozen=True, kw_only=True)
class RateLadder:
    """Losses over learning rates, compared with a reference loss."""

    depth: int
    """Number of blocks."""
    steps: int
    """Training steps at each rate."""
    rates: tuple[float, ...]
    losses: tuple[Number, ...]
    """Final loss ℓ(η) at each rate; None if it was not finite or rose above 20."""
    start: float
    """Initial loss ℓ₀."""
    twin: Twin | None = None
    reference: float
    """Reference loss ℓ_ref."""
    reference_from: str
    """Design whose loss is the reference."""
    usable: tuple[float, float] | None
    """The longest range of usable rates; None if there is none."""
    decades: float
    """Width of that range in decades."""
    sens: float
    """Sensitivity to the rate: mean over the rates of min(ℓ(η), ℓ₀) - ℓ_ref."""
    lr_max: float | None
    """The largest stable rate; None if no rate lowered the initial loss."""
