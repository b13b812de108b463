"""CompareConfig: schemes, learning rates, seeds and common training options of a comparison.

Importing this does not import torch, so that `--help` is fast; making a configuration does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from normlab.compare.bracket import Bracket, RateList, start_rate
from normlab.compare.run_options import RunOptions, RunSettings
from normlab.errors import NormLabError
from normlab.models.config import SchemeLike, TransformerConfig
from normlab.train.config import TrainConfig

if TYPE_CHECKING:
    from normlab.compare.plan import Plan
    from normlab.schemes.contract.scheme import Scheme

FIRST_TUNE_SEED = 1000
"""First seed of the tuning runs: smaller ones are for the final runs, so that no seed is used for both."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunOptions):
    """Configuration of a comparison: every scheme at its own tuned learning rate, with the same data and seeds."""

    several: ClassVar[dict[str, str]] = {"scheme": "schemes", "lr": "lrs", "seed": "seeds"}
    """Fields of a run, and the fields of a comparison that list their values."""

    base: TrainConfig
    """Configuration that all runs share. Scheme, learning rate and seed are set by the comparison."""

    schemes: tuple[SchemeLike, ...] = ("pre", "post", "peri", "geonorm")
    """Schemes to compare: names, names with options ("peri(step=0.1)"), or schemes in files (highway.py:Highway)."""
    lrs: Literal["auto"] | tuple[float, ...] = "auto"
    """Learning rates to tune over for each scheme: auto, or a list; with one rate nothing is tuned.
    auto starts with 1e-3 * (85M / (12 depth width^2))^0.2, half and twice that rate,
    widens by factors of 2, at most 64 either way (16 while no run has trained), until the best lies between two others,
    and then tries the best times and divided by sqrt(2)."""
    refine_rates: bool = True
    """End the search of auto with the rates a factor of sqrt(2) below and above the best: two more runs per scheme."""
    widen_rates: bool = False
    """Extend a list of rates while its best is the largest or the smallest:
    by the list's own steps, up to a factor of 64 either way, before the final runs. auto always does this."""
    seeds: int = 3
    """Final runs of each scheme at its tuned rate; seed i of all schemes sees the same data in the same order."""
    tune_seeds: int = 1
    """Tuning runs at each learning rate; their seeds are not used for the final runs."""
    baseline: SchemeLike | None = None
    """Scheme that the others are compared with; none: pre if it is among them, else the first."""
    level: float = 0.95
    """Simultaneous confidence level of all intervals."""

    def __post_init__(self) -> None:
        from normlab.schemes.catalog.registry import scheme

        object.__setattr__(self, "schemes", tuple(scheme(spec) for spec in self.schemes))
        object.__setattr__(self, "lrs", listed_rates(self.lrs))
        check_list("scheme", self.names, "pre")
        if self.lrs != "auto":
            check_list("rate", self.lrs, "1e-3")
        object.__setattr__(self, "baseline", self._baseline())
        self._check_numbers()
        # A scheme that the model does not support is refused now, not after the first runs.
        _ = self.models

    @property
    def names(self) -> tuple[str, ...]:
        """Labels of the schemes, in the order in which they were given."""
        return tuple(scheme.label for scheme in self._objects)

    @property
    def _objects(self) -> tuple[Scheme, ...]:
        return self.schemes  # type: ignore[return-value]  # text is parsed when the configuration is made

    @property
    def baseline_name(self) -> str:
        """Label of the baseline."""
        return self.baseline.label  # type: ignore[union-attr]  # set when the configuration is made

    @property
    def sources(self) -> dict[str, str]:
        """Origin and content hash of the schemes that are in the user's own files or modules, by label."""
        return {one.label: str(one.origin().shared) for one in self._objects if one.origin()}  # type: ignore[union-attr]

    @cached_property
    def models(self) -> dict[str, TransformerConfig]:
        """The model configuration with each scheme, by the scheme's label."""
        return dict(zip(self.names, self.base.model.with_schemes(self.schemes), strict=True))

    @cached_property
    def bracket(self) -> Bracket | RateList | None:
        """The learning-rate search; None where the rates are those listed, and no others."""
        if self.lrs != "auto":
            return RateList(tuple(map(float, self.lrs))) if self.widen_rates else None
        # A rate that is transferred is that of the base.
        depth, width = self.base.base_depth or self.base.model.depth, self.base.base_dim or self.base.model.dim
        return Bracket(start_rate(depth, width), self.refine_rates)

    @property
    def first_rates(self) -> tuple[float, ...]:
        """The learning rates that are tried for every scheme in any case."""
        return self.bracket.first if self.bracket is not None else tuple(map(float, self.lrs))

    @property
    def run_settings(self) -> RunSettings:
        """How the runs are executed."""
        # From the whole plan, not from the remaining runs: the number of threads changes the last digits of a result.
        at_once = len(self.names) * max(self.seeds, len(self.first_rates) * self.tune_seeds)
        return RunSettings(self, self.base.device, at_once)

    def run(self, scheme: str, lr: float, seed: int) -> TrainConfig:
        """Configuration of one run."""
        return dataclasses.replace(self.base, model=self.models[scheme], lr=lr, seed=seed)

    def plan(self) -> Plan:
        """The plan of all runs."""
        from normlab.compare.plan import Plan

        return Plan(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what does not affect the result."""
        base = self.base.to_dict()
        model = {name: value for name, value in base["model"].items() if name != "scheme"}
        shared = {name: value for name, value in base.items() if name not in ("lr", "seed")} | {"model": model}
        # Left out where they say nothing, as in comparisons that were stored before there were such options.
        special: dict[str, Any] = {"sources": self.sources} if self.sources else {}
        if not self.refine_rates:
            special["refine_rates"] = False
        if self.widen_rates:
            special["widen_rates"] = True
        return {
            "schemes": list(self.names), "lrs": self.lrs if self.lrs == "auto" else list(self.lrs), "seeds": self.seeds,
            "tune_seeds": self.tune_seeds, "baseline": self.baseline_name, "level": self.level, "base": shared,
        } | special  # fmt: skip

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
        if self.widen_rates and len(self.first_rates) == 1:
            raise NormLabError("widen_rates needs two rates or more, got one, with which nothing is tuned; try auto")
        if self.tune_seeds < 1:
            raise NormLabError(f"tune_seeds must be at least 1, got {self.tune_seeds}; name one rate to tune nothing")
        if not 0.0 < self.level < 1.0:
            raise NormLabError(f"level lies between 0 and 1, got {self.level}; try 0.95")
        self.check_run_options()


def listed_rates(lrs: Any) -> Literal["auto"] | tuple[float, ...]:
    """The option --lrs as auto or numbers."""
    if lrs == "auto" or (len(lrs) == 1 and lrs[0] == "auto"):
        return "auto"
    try:
        if isinstance(lrs, str):
            raise ValueError
        return tuple(float(lr) for lr in lrs)
    except ValueError:
        raise NormLabError(f"lrs must be auto or numbers, got {lrs!r}; try auto, or 5e-4 1e-3 2e-3") from None


def check_list(kind: str, values: Sequence[Any], example: str) -> None:
    """Raise for an empty list of schemes or rates, and for one that names something twice."""
    if not values:
        raise NormLabError(f"at least one {kind} is needed; try {example}")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise NormLabError(f"{kind} {twice!s} is named twice; name it once")
