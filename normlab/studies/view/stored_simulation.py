"""Read the result of a simulation or an experiment back from the rows of a study, for its page.

Rows keep no figures of experiments and no paths of tokens: the page names the command that draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from normlab.dynamics.experiments.result import ExperimentResult
from normlab.dynamics.result import SchemeRun, Simulation
from normlab.studies.items import simulation_config
from normlab.studies.study import Study
from normlab.utils.records import from_plain, to_plain

Row = Mapping[str, Any]

NOTE = "The rows of a study, which this page is made from, keep no figures; the command below draws them."
_DRAWN = ("shown", "bins")
"""Settings of what is drawn alone."""


def stored_result(study: Study, arm: str, rows: Sequence[Row]) -> Simulation | ExperimentResult:
    """The result of an arm, from its rows."""
    first, settings = rows[0], study.settings_of(arm)
    shared = {"versions": first["versions"], "command": tuple(simulate_command(settings))}
    if "experiment" in settings:
        found = {**first["result"], "figures": [], "notes": [*first["result"]["notes"], NOTE]}
        return ExperimentResult.from_dict({**found, **shared})
    _, config = simulation_config(study, settings)
    runs = tuple(from_plain(SchemeRun, row["result"], row["run"]) for row in rows)
    return Simulation(config=to_plain(config), runs=runs, seconds=_seconds(first), **shared)


def simulate_command(settings: Mapping[str, Any]) -> list[str]:
    """The command that computes an arm again and writes its page, figures included."""
    words = ["normlab", "simulate", *([settings["experiment"]] if "experiment" in settings else [])]
    for name, value in settings.items():
        if name not in ("experiment", *_DRAWN):
            words += _flag(name.replace("_", "-"), value)
    return [*words, "--html", "page.html"]


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]


def _seconds(row: Row) -> float:
    return (datetime.fromisoformat(row["finished"]) - datetime.fromisoformat(row["started"])).total_seconds()
