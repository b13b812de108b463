"""What the command line asks for: an experiment by its name, or a free run."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import experiment
from normlab.dynamics.experiments.result import ExperimentResult
from normlab.dynamics.result import Simulation
from normlab.dynamics.simulate import simulate
from normlab.dynamics.system import laws
from normlab.errors import NormLabError
from normlab.utils.files import writable

__all__ = ["run", "writable"]


def run(name: str | None, config: SimulateConfig, *, command: Sequence[str] = ()) -> Simulation | ExperimentResult:
    """Do it, with the progress on standard error."""
    if name is None:
        return simulate(config=config, progress=True, command=command)
    try:
        found = experiment(name)
    except NormLabError:
        if _is_law(name):
            raise NormLabError(f"{name} is a scheme and no experiment; try normlab simulate --scheme {name}") from None
        raise
    return found.run(config, progress=True, command=command)


def _is_law(name: str) -> bool:
    try:
        laws.find(name, depth=1)
    except NormLabError:
        return False
    return True
