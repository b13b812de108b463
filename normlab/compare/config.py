"""CompareConfig: schemes, learning rates, seeds and common training options of a comparison.

Importing this does not import torch: the command line shows these fields in its help. Making a configuration does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from normlab.compare.bracket import Bracket, start_rate
from normlab.errors import NormLabError, unknown
from normlab.models.config import SchemeLike, TransformerConfig
from normlab.train.config import TrainConfig

if TYPE_CHECKING:
    from normlab.compare.plan import Plan
    from normlab.schemes.contract.scheme import Scheme

Where = Literal["here", "ray"]

FIRST_TUNE_SEED = 1000
"""Seeds from here on pick a rate, those below judge it: no seed does both."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Schemes trained alike: each at its own best learning rate, found in the same way, and with the same seeds."""

    several: ClassVar[dict[str, str]] = {"scheme": "schemes", "lr": "lrs", "seed": "seeds"}
    """What a run has one of, and a comparison several."""

    base: TrainConfig
    """What all runs share. Its scheme, rate and seed are not used: the comparison sets them."""

    schemes: tuple[SchemeLike, ...] = ("pre", "post", "peri", "geonorm")
    """What is compared: names, names with options ("peri(step=0.1)"), or schemes in files (highway.py:Highway)."""
    lrs: Literal["auto"] | tuple[float, ...] = "auto"
    """Learning rates tried for each scheme: auto, or a list; with one rate there is nothing to tune.
    auto starts at 1e-3 * (85M / (12 depth width^2))^0.2, its half and its double,
    goes on by factors of 2, at most 16 either way, until the best lies between two others,
    and tries sqrt(2) around the best."""
    seeds: int = 3
    """Runs that judge each scheme at its picked rate; seed i of all schemes sees the same data in the same order."""
    tune_seeds: int = 1
    """Runs at each rate that pick it; their seeds judge nothing."""
    baseline: SchemeLike | None = None
    """The scheme that the others are measured against; none: pre where it is among them, else the first."""
    level: float = 0.95
    """Probability that all intervals hold together."""

    repeat_failed: bool = False
    """Run again what has failed, from its last checkpoint."""
    retries: int = 2
    """How often a run whose process was killed is started again, from its last checkpoint.
    After that it is interrupted: it says nothing of its scheme, and the next call tries it again."""
    on: Where = "here"
    """Processes on this machine, or a Ray cluster whose machines share the folder and the data."""
    workers: int | None = None
    """Runs at a time; none: one a GPU, or one a core without any. Two a GPU: one compiles while the other trains."""

    def __post_init__(self) -> None:
        from normlab.schemes.catalog.registry import scheme

        object.__setattr__(self, "schemes", tuple(scheme(spec) for spec in self.schemes))
        object.__setattr__(self, "lrs", _rates(self.lrs))
        _check_list("scheme", self.names, "pre")
        if self.lrs != "auto":
            _check_list("rate", self.lrs, "1e-3")
        object.__setattr__(self, "baseline", self._baseline())
        self._check_numbers()
        # A scheme that the model cannot have is better refused now than after the first hour.
        _ = self.models

    @property
    def names(self) -> tuple[str, ...]:
        """The schemes as tables show them, in the order in which they were named."""
        return tuple(scheme.label for scheme in self._objects)

    @property
    def _objects(self) -> tuple[Scheme, ...]:
        return self.schemes  # type: ignore[return-value]  # text is read when the configuration is made

    @property
    def baseline_name(self) -> str:
        """The baseline as tables show it."""
        return self.baseline.label  # type: ignore[union-attr]  # settled when the configuration is made

    @property
    def sources(self) -> dict[str, str]:
        """Where the schemes come from that are in files or modules of the user's, by name; their content included."""
        return {one.label: str(one.origin().shared) for one in self._objects if one.origin()}  # type: ignore[union-attr]

    @cached_property
    def models(self) -> dict[str, TransformerConfig]:
        """The same model under every scheme, by the scheme's name."""
        return dict(zip(self.names, self.base.model.with_schemes(self.schemes), strict=True))

    @cached_property
    def bracket(self) -> Bracket | None:
        """The search for each scheme's rate; None where the rates are listed."""
        # A rate that is carried over from another width (muP) is that width's.
        width = self.base.base_dim or self.base.model.dim
        return Bracket(start_rate(self.base.model.depth, width)) if self.lrs == "auto" else None

    @property
    def first_rates(self) -> tuple[float, ...]:
        """The rates that are tried for every scheme, whatever comes out."""
        return self.bracket.first if self.bracket is not None else tuple(map(float, self.lrs))

    def run(self, scheme: str, lr: float, seed: int) -> TrainConfig:
        """One run: the base with these three set."""
        return dataclasses.replace(self.base, model=self.models[scheme], lr=lr, seed=seed)

    def plan(self) -> Plan:
        """Which runs there are."""
        from normlab.compare.plan import Plan

        return Plan(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what the result does not depend on."""
        base = self.base.to_dict()
        model = {name: value for name, value in base["model"].items() if name != "scheme"}
        shared = {name: value for name, value in base.items() if name not in ("lr", "seed")} | {"model": model}
        return {
            "schemes": list(self.names), "lrs": self.lrs if self.lrs == "auto" else list(self.lrs), "seeds": self.seeds,
            "tune_seeds": self.tune_seeds, "baseline": self.baseline_name, "level": self.level, "base": shared,
        } | ({"sources": self.sources} if self.sources else {})  # fmt: skip

    def _baseline(self) -> Scheme:
        from normlab.schemes.catalog.registry import scheme

        if self.baseline is None:
            return scheme("pre" if "pre" in self.names else self.schemes[0])
        named = scheme(self.baseline)
        if named.label not in self.names:
            raise NormLabError(
                f"baseline {named.label!r} is not among the schemes ({', '.join(self.names)}); "
                f"add it to them, or name one of them: --baseline {self.names[0]!r}"
            )
        return named

    def _check_numbers(self) -> None:
        for lr in self.first_rates:
            if not (math.isfinite(lr) and lr > 0.0):
                raise NormLabError(f"a learning rate is positive and finite, got {lr}; try 1e-3")
        if not 1 <= self.seeds <= FIRST_TUNE_SEED:
            raise NormLabError(f"seeds must lie in [1, {FIRST_TUNE_SEED}], got {self.seeds}; try 3")
        if self.tune_seeds < 1:
            raise NormLabError(f"tune_seeds must be at least 1, got {self.tune_seeds}; name one rate to tune nothing")
        if self.retries < 0:
            raise NormLabError(f"retries must not be negative, got {self.retries}; 0 starts no run again")
        if not 0.0 < self.level < 1.0:
            raise NormLabError(f"level lies between 0 and 1, got {self.level}; try 0.95")
        if self.on not in get_args(Where):
            raise unknown("place to run", self.on, get_args(Where))
        if self.workers is not None and self.workers < 1:
            raise NormLabError(f"workers must be at least 1, got {self.workers}; leave it out to use the whole machine")


def _rates(lrs: Any) -> Literal["auto"] | tuple[float, ...]:
    if lrs == "auto" or (len(lrs) == 1 and lrs[0] == "auto"):
        return "auto"
    try:
        if isinstance(lrs, str):
            raise ValueError
        return tuple(float(lr) for lr in lrs)
    except ValueError:
        raise NormLabError(f"lrs must be auto or numbers, got {lrs!r}; try auto, or 5e-4 1e-3 2e-3") from None


def _check_list(kind: str, values: Sequence[Any], example: str) -> None:
    if not values:
        raise NormLabError(f"a comparison needs at least one {kind}; try {example}")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise NormLabError(f"{kind} {twice!s} is named twice; name it once")
