"""Experiments of `normlab simulate`: their names, descriptions and default options. Does not import torch.

    result = normlab.dynamics.experiments.run("speed-laws")
    result.table(), result.verdicts, result.figures, result.save("speed.json")

Each experiment is one module with a function `run(config, tell) -> Findings`; `tell` reports progress.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normlab.dynamics.config import SimulateConfig
from normlab.errors import NormLabError, unknown

if TYPE_CHECKING:
    from normlab.dynamics.experiments.result import ExperimentResult

PAPER_LAWS = ("post", "pre", "mix", "peri", "ngpt(alpha=1.0)", "sqrt")
"""The laws of arXiv 2510.22026."""
_BETAS = tuple(round(0.1 * k, 1) for k in range(1, 91))
_FLOW = ("tokens", "seed", "radius", "time", "depth", "step", "tolerance", "clock", "device")
"""Options of every simulation of a law."""
_ATTENTION = ("weights", "heads", "causal", "kind", "mlp")


@dataclass(frozen=True)
class Experiment:
    """Name, description and default options of an experiment."""

    name: str
    about: str
    defaults: SimulateConfig
    several: tuple[str, ...]
    """Those of `scheme` and `beta` that may have several values."""
    reads: tuple[str, ...]
    """Options that may differ from the defaults, beside scheme, β and method. The others have no effect, or the
    predictions hold for their defaults alone."""
    methods: tuple[str, ...] = ("rk4", "dopri")
    beta: Callable[[SimulateConfig], float] | None = None
    """Computes β from the other options if β was left at its default."""

    def run(
        self, config: SimulateConfig | None = None, *, progress: bool = False, command: Sequence[str] = ()
    ) -> ExperimentResult:
        """Run the experiment and compare the measurements with their predictions."""
        from normlab.dynamics.experiments.result import run_experiment

        home = importlib.import_module(f"{__name__}.{self.name.replace('-', '_')}")
        return run_experiment(
            self, self._with_beta(config or self.defaults), home.run, progress=progress, command=command
        )

    def check(self, config: SimulateConfig) -> None:
        """Raise if an option has a value that the experiment does not use, or that its predictions do not cover."""
        for name in ("scheme", "beta"):
            values = getattr(config, name)
            if name not in self.several and len(values) > 1:
                given = ", ".join(map(str, values))
                raise NormLabError(f"{self.name} takes one value of {name}, got {given}; try {values[0]}")
        if config.method not in self.methods:
            raise NormLabError(f"{self.name} has no method {config.method}; try {' or '.join(self.methods)}")
        for spec in dataclasses.fields(config):
            value, default = getattr(config, spec.name), getattr(self.defaults, spec.name)
            if value != default and spec.name not in ("scheme", "beta", "method", *self.reads):
                texts = f"{spec.name} must stay {_text(default)}, got {_text(value)}"
                raise NormLabError(f"{self.name}: {texts}; leave it out")

    def _with_beta(self, config: SimulateConfig) -> SimulateConfig:
        if self.beta is None or config.beta != self.defaults.beta:
            return config
        return config.replace(beta=self.beta(config))


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_ALL = (
    Experiment(
        "speed-laws",
        "initial velocity and tail of every scheme, against closed forms",
        SimulateConfig(scheme=("all",), tokens=32, dim=32, time=10.0, looks=25, dtype="float64", shown=0, bins=0),
        several=("scheme",),
        reads=(*_FLOW, "dim", "looks"),
    ),
    Experiment(
        "random-weights",
        "mean cosine against depth with random weights, over seeds",
        SimulateConfig(
            scheme=PAPER_LAWS, tokens=256, dim=512, beta=(512**0.5,), seeds=20, time=10.0, step=0.5, looks=20,
            weights="kaiming", observables=("cosine", "speed"), shown=0, bins=0,
        ),
        # As in the paper: logits then have the same spread in every dimension.
        beta=lambda config: config.dim**0.5,
        several=("scheme",),
        reads=(*_FLOW, *_ATTENTION, "dim", "start", "looks", "seeds", "redraw", "cut", "dtype"),
        methods=("rk4", "dopri", "network"),
    ),
    Experiment(
        "phase-diagram",
        "share of pairs that have met, over time and temperature, with the closed-form curve",
        SimulateConfig(
            scheme=("post",), tokens=32, dim=128, beta=_BETAS, seeds=16, time=30.0, step=0.5, looks=60,
            observables=("close",), shown=0, bins=0,
        ),
        several=("beta",),
        reads=(*_FLOW, "dim", "looks", "seeds", "dtype"),
    ),
    Experiment(
        "phase-by-scheme",
        "the same diagram for every scheme",
        SimulateConfig(
            scheme=PAPER_LAWS, tokens=32, dim=8, beta=_BETAS, seeds=32, time=100.0, step=0.5, looks=60,
            observables=("close",), shown=0, bins=0,
        ),
        several=("scheme", "beta"),
        reads=(*_FLOW, *_ATTENTION, "dim", "start", "looks", "seeds", "dtype"),
    ),
    Experiment(
        "metastability",
        "clusters that last exponentially long: the staircase and its merge times",
        SimulateConfig(
            scheme=("post",), tokens=40, dim=2, beta=(2000.0,), time=1e30, method="dopri", tolerance=1e-7, clock="log",
            looks=400, dtype="float64", shown=0, bins=0,
        ),
        several=(),
        reads=("tokens", "dim", "start", "seed", "radius", "time", "depth", "tolerance", "device"),
        methods=("dopri",),
    ),
    Experiment(
        "causal",
        "leaders under a causal mask against the temperature, and Rényi's parking",
        SimulateConfig(
            scheme=("post",), tokens=2048, dim=2, beta=(30.0, 60.0, 120.0, 250.0, 500.0, 1000.0), seeds=1, time=20.0,
            step=0.2, looks=2, causal=True, observables=("clusters",), shown=0, bins=0,
        ),
        several=("beta",),
        reads=(*_FLOW, "dim", "causal", "seeds", "dtype"),
    ),
    Experiment(
        "value-spectrum",
        "what the spectrum of V makes tokens converge to, without normalisation",
        SimulateConfig(
            scheme=("none",), tokens=128, dim=128, radius=3.0, time=15.0, step=0.1, looks=30, dtype="float64", shown=0,
            bins=0,
        ),
        several=(),
        reads=(*_FLOW, "dim", "start", "looks", "dtype"),
    ),
    Experiment(
        "real-model",
        "observables of a network beside those of the simulation with its weights",
        SimulateConfig(
            scheme=("pre",), tokens=64, seeds=4, step=0.25, causal=True, shown=0, bins=0,
            observables=("cosine", "variance", "order", "rank", "radius"),
        ),
        several=(),
        reads=(
            "model", "data", "tokens", "seeds", "seed", "step", "tolerance", "clock", "causal", "kind", "observables",
            "angle", "device",
        ),
    ),
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name; unknown names raise."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def run(name: str, *, progress: bool = False, **options: Any) -> ExperimentResult:
    """Run an experiment; `options` are fields of `SimulateConfig` that replace its defaults."""
    found = find_experiment(name)
    return found.run(found.defaults.replace(**options), progress=progress)
