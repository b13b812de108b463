"""The `normlab simulate` command: run an experiment by name, or a simulation without one."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import find_experiment
from normlab.dynamics.experiments.result import ExperimentResult
from normlab.dynamics.result import Simulation
from normlab.dynamics.simulate import simulate
from normlab.dynamics.system import laws
from normlab.errors import NormLabError


def run_command(
    name: str | None, config: SimulateConfig, *, command: Sequence[str] = ()
) -> Simulation | ExperimentResult:
    """Run the experiment `name`, or a plain simulation if it is None, with a progress bar on standard error."""
    if name is None:
        return simulate(config=config, progress=True, command=command)
    try:
        found = find_experiment(name)
    except NormLabError:
        if _is_law(name):
            raise NormLabError(f"{name} is a scheme and no experiment; try normlab simulate --scheme {name}") from None
        raise
    return found.run(config, progress=True, command=command)


def _is_law(name: str) -> bool:
    try:
        laws.find_law(name, depth=1)
    except NormLabError:
        return False
    return True
