"""Experiments of `normlab simulate`: their names, descriptions and default options. Does not import torch.

    result = normlab.dynamics.experiments.run("speed-laws")
    result.table(), result.verdicts, result.figures, result.save("speed.json")

Each experiment is one module with a function `run(config, tell) -> Findings`; `tell` reports progress.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normlab.dynamics.config import SimulateConfig
from normlab.errors import unknown

if TYPE_CHECKING:
    from normlab.dynamics.experiments.result import ExperimentResult

PAPER_LAWS = ("post", "pre", "mix", "peri", "ngpt(alpha=1.0)", "sqrt")
"""The laws of arXiv 2510.22026."""
_BETAS = tuple(round(0.1 * k, 1) for k in range(1, 91))


@dataclass(frozen=True)
class Experiment:
    """Name, description and default options of an experiment."""

    name: str
    about: str
    defaults: SimulateConfig
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

    def _with_beta(self, config: SimulateConfig) -> SimulateConfig:
        if self.beta is None or config.beta != self.defaults.beta:
            return config
        return config.replace(beta=self.beta(config))


_ALL = (
    Experiment(
        "speed-laws",
        "initial velocity and tail of every scheme, against closed forms",
        SimulateConfig(scheme=("all",), tokens=32, dim=32, time=10.0, looks=25, dtype="float64", shown=0, bins=0),
    ),
    Experiment(
        "random-weights",
        "mean cosine against depth with random weights, over seeds",
        SimulateConfig(
            scheme=PAPER_LAWS, tokens=256, dim=512, beta=(512**0.5,), seeds=20, time=10.0, step=0.5, looks=20,
            weights="kaiming", observables=("cosine", "speed", "radius"), shown=0, bins=0,
        ),
        # As in the paper: logits then have the same spread in every dimension.
        beta=lambda config: config.dim**0.5,
    ),
    Experiment(
        "phase-diagram",
        "share of pairs that have met, over time and temperature, with the closed-form curve",
        SimulateConfig(
            scheme=("post",), tokens=32, dim=128, beta=_BETAS, seeds=16, time=30.0, step=0.5, looks=60,
            observables=("close",), shown=0, bins=0,
        ),
    ),
    Experiment(
        "phase-by-scheme",
        "the same diagram for every scheme",
        SimulateConfig(
            scheme=PAPER_LAWS, tokens=32, dim=8, beta=_BETAS, seeds=32, time=100.0, step=0.5, looks=60,
            observables=("close",), shown=0, bins=0,
        ),
    ),
    Experiment(
        "metastability",
        "clusters that last exponentially long: the staircase and its merge times",
        SimulateConfig(
            scheme=("post",), tokens=40, dim=2, beta=(2000.0,), time=1e30, method="dopri", tolerance=1e-7, clock="log",
            looks=400, dtype="float64", shown=0, bins=0,
        ),
    ),
    Experiment(
        "causal",
        "leaders under a causal mask against the temperature, and Rényi's parking",
        SimulateConfig(
            scheme=("post",), tokens=2048, dim=2, beta=(30.0, 60.0, 120.0, 250.0, 500.0, 1000.0), seeds=1, time=20.0,
            step=0.2, looks=2, causal=True, observables=("clusters",), shown=0, bins=0,
        ),
    ),
    Experiment(
        "value-spectrum",
        "what the spectrum of V makes tokens converge to, without normalisation",
        SimulateConfig(
            scheme=("none",), tokens=128, dim=128, radius=3.0, time=15.0, step=0.1, looks=30, dtype="float64", shown=0,
            bins=0,
        ),
    ),
    Experiment(
        "real-model",
        "observables of a network beside those of the simulation with its weights",
        SimulateConfig(
            scheme=("pre",), tokens=64, seeds=4, step=0.25, causal=True, shown=0, bins=0,
            observables=("cosine", "variance", "order", "rank", "radius"),
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
