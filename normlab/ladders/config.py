"""LadderConfig: schemes, sizes, budgets and seeds of a ladder, and how learning rates are found and carried over.

Importing this does not import torch, so that `--help` is fast; making a configuration does.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from normlab.compare.bracket import start_rate
from normlab.compare.config import check_list, listed_rates
from normlab.compare.run_options import RunOptions, RunSettings
from normlab.errors import NormLabError, advice_for, unknown
from normlab.ladders.rung import Rung, path_batch, path_decay
from normlab.ladders.size import Size, Target
from normlab.models.config import SchemeLike, TransformerConfig
from normlab.train.config import TrainConfig
from normlab.utils.counts import Count

if TYPE_CHECKING:
    from normlab.schemes.contract.scheme import Scheme

Carry = Literal["width", "width+depth", "none"]

TUNE_SEED = 1000
"""Seed of the runs that find learning rates: no run that is judged has it."""

_CONSTANT_SHARE = 0.5
"""The best constant learning rate as a fraction of the best cosine peak (arXiv 2405.18392): where the search starts."""


@dataclass(frozen=True, kw_only=True)
class LadderConfig(RunOptions):
    """Configuration of a ladder: the same schemes at several sizes and budgets, each at its own learning rate."""

    several: ClassVar[dict[str, str]] = {
        "scheme": "schemes", "lr": "lrs", "seed": "seeds", "tokens": "budgets", "depth": "sizes", "dim": "sizes",
        "heads": "head-width", "head_dim": "head-width", "warmup": "warmup-steps", "base_dim": "carry",
        "base_depth": "carry", "schedule": "budgets", "continued": "budgets",
    }  # fmt: skip
    """Fields of a run, and the options of a ladder that set them."""

    base: TrainConfig
    """Configuration that all runs share."""

    schemes: tuple[SchemeLike, ...] = ("pre", "peri", "geonorm", "spannorm")
    """Schemes to compare at every size."""
    small_schemes: tuple[SchemeLike, ...] = ()
    """Schemes to compare at all sizes but the largest."""
    sizes: tuple[str, ...] = ("4x256", "6x384", "8x512", "12x768")
    """Model sizes, depth x width."""
    budgets: tuple[Count, ...] = (29_500_000, 59_000_000, 118_000_000)
    """Training tokens at every size;
    all budgets of a size, scheme and seed come from one run at a constant rate, by cooldown branches."""
    tokens_per_parameter: float | None = None
    """One budget for each size, this number of tokens per parameter, in place of --budgets; the batch grows with it."""
    seeds: int = 3
    """Runs of each scheme at each size; seed i of all schemes sees the same data in the same order."""
    top_seeds: int | None = None
    """Runs of each scheme at the largest size; none: as many as --seeds."""
    hold_out: bool = True
    """Forecast the largest size from the smaller ones before it is trained."""
    target: tuple[str, ...] = ()
    """Sizes and budgets too large to try, at which the gap is estimated: 16x1024:400M."""

    lrs: Literal["auto"] | tuple[float, ...] = "auto"
    """Learning rates to try at the smallest size: auto, or a list;
    both are widened until the best lies between two others. With one rate nothing is tuned."""
    refine_rates: bool = True
    """End each search with the rates a factor of sqrt(2) below and above the best."""
    rate_budgets: tuple[Count, ...] = ()
    """Budgets at which the rates are tried; none: the smallest and the largest."""
    carry: Carry = "width"
    """Rule that carries rates from the smallest size to the others, tested at a middle size: width (muP),
    width+depth (CompleteP where the scheme derives it), or none (rates fall with size^-0.2)."""
    warmup_steps: int = 200
    """Linear warm-up in steps, the same at every rung."""
    head_width: int = 64
    """Width of an attention head at every size."""
    epochs: float = 4.0
    """Most passes over the training data; a ladder that needs more is refused."""

    baseline: SchemeLike | None = None
    """Scheme that the others are compared with; none: pre if it is among them, else the first."""
    level: float = 0.95
    """Confidence level at any one cell or place, for all schemes together; over all cells at once it is less."""

    def __post_init__(self) -> None:
        from normlab.schemes.catalog.registry import scheme

        for name in ("schemes", "small_schemes"):
            object.__setattr__(self, name, tuple(scheme(spec) for spec in getattr(self, name)))
        object.__setattr__(self, "lrs", listed_rates(self.lrs))
        self._check_lists()
        self._check_numbers()
        object.__setattr__(self, "baseline", self._baseline())
        # A scheme or a size that the model does not support is refused now, not after the first runs.
        for size in self.all_sizes:
            _ = self.models[size]
        _ = [self.run(rung, name, budget, 1e-3, 0) for rung in self.rungs for name in self.names_at(rung)
             for budget in rung.budgets]  # fmt: skip

    # -- schemes -------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Labels of all schemes, those of the smaller sizes last."""
        return tuple(one.label for one in (*self._objects("schemes"), *self._objects("small_schemes")))

    @property
    def baseline_name(self) -> str:
        """Label of the baseline."""
        return self.baseline.label  # type: ignore[union-attr]  # set when the configuration is made

    def names_at(self, rung: Rung) -> tuple[str, ...]:
        """Labels of the schemes that are trained at a size."""
        is_top = rung.size == self.all_sizes[-1]
        return tuple(one.label for one in self._objects("schemes")) if is_top else self.names

    def _objects(self, field: str) -> tuple[Scheme, ...]:
        return getattr(self, field)

    # -- sizes and budgets ---------------------------------------------------------------------------------------------

    @cached_property
    def all_sizes(self) -> tuple[Size, ...]:
        """The sizes, ascending by their number of parameters."""
        return tuple(sorted((Size.parse(text) for text in self.sizes), key=lambda size: size.depth * size.width**2))

    @cached_property
    def all_targets(self) -> tuple[Target, ...]:
        return tuple(Target.parse(text) for text in self.target)

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """All sizes with their budgets, from the smallest on."""
        budgets = [self._budgets_at(size) for size in self.all_sizes]
        first, batch, decay = budgets[0][-1], self.base.batch, self.base.weight_decay
        rungs = []
        for size, own in zip(self.all_sizes, budgets, strict=True):
            is_top = size == self.all_sizes[-1]
            larger = path_batch(batch, own[-1], first)
            rungs.append(Rung(
                size, own, larger, path_decay(decay, larger, own[-1], batch, first),
                (self.top_seeds or self.seeds) if is_top else self.seeds, is_top and self.hold_out,
            ))  # fmt: skip
        return tuple(rungs)

    def rung(self, size: Size) -> Rung:
        """The rung of a size."""
        return next(rung for rung in self.rungs if rung.size == size)

    def _budgets_at(self, size: Size) -> tuple[int, ...]:
        if self.tokens_per_parameter is None:
            return tuple(sorted(self.budgets))
        return (round(self.tokens_per_parameter * self.parameters(size)),)

    def parameters(self, size: Size, scheme: str | None = None) -> int:
        """Parameters of the model at a size: those of the baseline where no scheme is named."""
        return self.models[size][scheme or self.baseline_name].num_params()

    # -- models and runs -----------------------------------------------------------------------------------------------

    @cached_property
    def models(self) -> dict[Size, dict[str, TransformerConfig]]:
        """The model configuration of each size with each scheme, all with the same kind of head."""
        return {size: self.models_at(size) for size in self.all_sizes}

    def models_at(self, size: Size) -> dict[str, TransformerConfig]:
        """The model configuration of a size with each scheme, by the scheme's label."""
        if size.width % self.head_width:
            raise NormLabError(
                f"size {size}: its width is not a multiple of the head width {self.head_width}; "
                f"try --head-width {math.gcd(size.width, self.head_width)}"
            )
        shape = {"depth": size.depth, "dim": size.width, "heads": size.width // self.head_width, "head_dim": None}
        model = dataclasses.replace(self.base.model, **shape)
        schemes = (*self._objects("schemes"), *self._objects("small_schemes"))
        return dict(zip(self.names, model.with_schemes(schemes), strict=True))

    def run(self, rung: Rung, scheme: str, budget: int, lr: float, seed: int) -> TrainConfig:
        """Configuration of one run: constant rate after the warm-up, decay at the end of its budget."""
        smallest = self.all_sizes[0]
        carried: dict[str, Any] = {"base_dim": smallest.width} if self.carry != "none" else {}
        if self.carry == "width+depth":
            carried["base_depth"] = smallest.depth
        # The rate is that of the first rung's batch; a larger batch takes a rate that is larger by its square root.
        lr *= math.sqrt(rung.batch / self.rungs[0].batch)
        steps = dataclasses.replace(self.base, tokens=budget, batch=rung.batch, warmup=0.0).steps
        if self.warmup_steps > steps:
            raise NormLabError(
                f"{rung.size} with {budget:,} tokens has {steps:,} steps, fewer than the {self.warmup_steps:,} of the "
                f"warm-up; try --warmup-steps {max(2, steps // 10)}, or larger budgets"
            )
        return dataclasses.replace(
            self.base, model=self.models[rung.size][scheme], tokens=budget, lr=lr, seed=seed, batch=rung.batch,
            weight_decay=rung.weight_decay, schedule="wsd", warmup=self.warmup_steps, stop_hopeless=True, **carried,
        )  # fmt: skip

    def for_data(self, data: Any) -> LadderConfig:
        """The same configuration with the vocabulary size of the data."""
        return dataclasses.replace(self, base=self.base.for_data(data))

    # -- learning rates ------------------------------------------------------------------------------------------------

    @property
    def is_tuned(self) -> bool:
        """Whether learning rates are searched for."""
        return self.lrs == "auto" or len(self.lrs) > 1

    @property
    def search_budgets(self) -> tuple[int, ...]:
        """Budgets of the smallest size at which rates are tried, ascending."""
        own = self.rungs[0].budgets
        return tuple(sorted(set(self.rate_budgets))) or tuple(sorted({own[0], own[-1]}))

    def usual_rate(self, size: Size) -> float:
        """The rate at which searches at a size start."""
        return _CONSTANT_SHARE * start_rate(size.depth, size.width)

    # -- execution -----------------------------------------------------------------------------------------------------

    @property
    def run_settings(self) -> RunSettings:
        """How the runs are executed."""
        return RunSettings(self, self.base.device, len(self.names) * max(self.seeds, 3))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what does not affect the result."""
        base = self.base.to_dict()
        model = {name: value for name, value in base["model"].items() if name not in ("scheme", *self.several)}
        shared = {name: value for name, value in base.items() if name not in self.several} | {"model": model}
        own = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
            if field.name not in {"base", *(option.name for option in dataclasses.fields(RunOptions))}
        }  # fmt: skip
        own |= {
            "schemes": [one.label for one in self._objects("schemes")],
            "small_schemes": [one.label for one in self._objects("small_schemes")],
            "baseline": self.baseline_name,
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()} | {
            "base": shared
        }

    # -- checks --------------------------------------------------------------------------------------------------------

    def _baseline(self) -> Scheme:
        from normlab.schemes.catalog.registry import scheme

        trained = [one.label for one in self._objects("schemes")]
        if self.baseline is None:
            return scheme("pre" if "pre" in trained else self.schemes[0])
        named = scheme(self.baseline)
        if named.label not in trained:
            raise NormLabError(
                f"baseline {named.label!r} is not among the schemes ({', '.join(trained)}); "
                f"add it to them, or name one of them: --baseline {trained[0]!r}"
            )
        return named

    def _check_lists(self) -> None:
        if self.base.budget != "tokens":
            raise NormLabError(f"a ladder has budgets in tokens; task {self.base.task} has none, try --task language")
        if not self.schemes:
            raise NormLabError("a ladder needs schemes at every size; try --schemes pre peri")
        check_list("scheme", self.names, "pre")
        check_list("size", [str(Size.parse(text)) for text in self.sizes], "4x256")
        check_list("budget", self.budgets, "30M")
        _ = self.all_targets
        if self.lrs != "auto":
            check_list("rate", self.lrs, "1e-3")
        stray = [budget for budget in self.rate_budgets if self.tokens_per_parameter is None
                 and budget not in self.budgets]  # fmt: skip
        if stray:
            raise NormLabError(
                f"rate budget {stray[0]:,} is not among the budgets ({', '.join(f'{b:,}' for b in self.budgets)}); "
                f"try --rate-budgets {min(self.budgets)}, or leave it out"
            )

    def _check_numbers(self) -> None:
        for name in ("seeds", "head_width"):
            if getattr(self, name) < 1:
                raise NormLabError(f"{name} must be at least 1, got {getattr(self, name)}; {advice_for(self, name)}")
        if max(self.seeds, self.top_seeds or 1) > TUNE_SEED or (self.top_seeds is not None and self.top_seeds < 1):
            raise NormLabError(f"seeds must lie in [1, {TUNE_SEED}], got {self.seeds} and {self.top_seeds}; try 3")
        if self.warmup_steps < 2:
            raise NormLabError(f"warmup_steps must be at least 2, got {self.warmup_steps}; try 200")
        if min(self.budgets) < 1:
            raise NormLabError(f"a budget must be positive, got {min(self.budgets)}; try 30M")
        if self.tokens_per_parameter is not None and not 0.0 < self.tokens_per_parameter < math.inf:
            raise NormLabError(f"tokens_per_parameter must be positive, got {self.tokens_per_parameter}; try 20")
        if not self.epochs > 0.0:
            raise NormLabError(f"epochs must be positive, got {self.epochs}; try 4")
        if not 0.0 < self.level < 1.0:
            raise NormLabError(f"level lies between 0 and 1, got {self.level}; try 0.95")
        for lr in () if self.lrs == "auto" else self.lrs:
            if not (math.isfinite(lr) and lr > 0.0):
                raise NormLabError(f"a learning rate is positive and finite, got {lr}; try 1e-3")
        if self.carry not in get_args(Carry):
            raise unknown("rule to carry rates", self.carry, get_args(Carry))
        if self.hold_out and len(self.sizes) < 2:
            raise NormLabError("a ladder of one size has nothing to forecast it from; add sizes, or --no-hold-out")
        self.check_run_options()
