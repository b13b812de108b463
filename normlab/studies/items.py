"""Work items of a study other than training runs: checks, simulations and benchmarks, run and stored one by one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normlab.errors import NormLabError, unknown
from normlab.studies.import_rows import benchmark_row
from normlab.studies.study import Study
from normlab.train.monitor.summary import digits
from normlab.train.storage.folder import now
from normlab.utils.settings import field_names
from normlab.utils.versions import versions

if TYPE_CHECKING:
    from normlab.dynamics.config import SimulateConfig

Row = dict[str, Any]
Settings = Mapping[str, Any]

_DROPPED = ("figures", "paths", "histogram", "command", "versions")
"""Parts of a result that are figures, or duplicates of the row."""

_BROKE = "the loss or a gradient of the first step was not finite"


@dataclass(frozen=True)
class Item:
    """One call whose rows are stored together."""

    name: str
    arm: str
    scheme: str
    seed: int
    call: Callable[[], list[Row]]
    """Rows with `scheme` and the measured values."""

    def is_done(self, rows: Sequence[Row]) -> bool:
        """Whether the call has returned; one that ended by an error is tried again."""
        return not all(_is_error(row) for row in self._own(rows))

    def has_begun(self, rows: Sequence[Row]) -> bool:
        """Whether there is a row of it, if only one of an error."""
        return bool(self._own(rows))

    def _own(self, rows: Sequence[Row]) -> list[Row]:
        # Rows of earlier versions name their item in `run` alone.
        return [
            row for row in rows if row.get("item", self.name) == self.name and row["run"].startswith(self.name + "/")
        ]


def study_items(study: Study) -> list[Item]:
    """All items of a study, by arm; wrong settings raise before the first one runs."""
    make = {"check": _checks, "simulate": _simulations, "bench": _benches}[study.kind]
    return [item for arm in study.arms for item in make(study, arm, study.settings_of(arm))]


def run_item(item: Item) -> list[Row]:
    """Rows of an item, or one row with the reason if it failed. Errors that the user can fix are raised."""
    began = now()
    try:
        found = item.call()
    except NormLabError:
        raise
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".strip()
        found = [{"scheme": item.scheme, "state": "failed", "reason": reason, "item_failed": True}]
    shared = {"item": item.name, "seed": item.seed, "state": "done", "reason": None}
    when = {"versions": versions(), "started": began, "finished": now()}
    return [{**shared, **row, **when, "run": f"{item.name}/{row['scheme']}/{k}"} for k, row in enumerate(found)]


def _is_error(row: Row) -> bool:
    """Whether a row stands for an item that ended by an error; in earlier versions every failed row did."""
    return bool(row.get("item_failed")) or ("item" not in row and row["state"] == "failed")


def _checks(study: Study, arm: str, settings: Settings) -> Iterator[Item]:
    from normlab.checks.config import CheckConfig

    targets = settings.get("targets")
    if not isinstance(targets, list) or not targets:
        raise NormLabError(f"{study.name}: a study of kind check names its targets, e.g. targets = ['pre', 'peri']")
    config = CheckConfig(**_known(study, settings, CheckConfig, {"targets"}))

    def call(target: str) -> list[Row]:
        from normlab.checks.check import check

        found = json_values(check(target, config=config).to_dict())
        return [{"scheme": target, **row} for row in _check_seeds(found)]

    for target in map(str, targets):
        yield Item(f"{arm}/{target}", arm, target, 0, lambda target=target: call(target))


def _check_seeds(found: Row) -> Iterator[Row]:
    """A row for every seed of a check, with its profiles `before` and `after` the burst at the largest depth."""
    profiles = found["ladder"]["profiles"]
    deepest = max(profile["boundaries"] for profile in profiles)
    own = [profile for profile in profiles if profile["boundaries"] == deepest]
    seeds = sorted({profile["seed"] for profile in own})
    for seed in seeds:
        steps = sorted((profile for profile in own if profile["seed"] == seed), key=lambda profile: profile["step"])
        row = {"seed": seed, "before": steps[0], "after": steps[-1]}
        # The result is one of all seeds together, and its theory that of the first: it is no observation of the others.
        row |= {"result": found} if seed == seeds[0] else {}
        # A burst that breaks at its first step has one profile.
        yield row if len(steps) > 1 else {**row, "after": None, "state": "failed", "reason": _BROKE}


def simulation_config(study: Study, settings: Settings) -> tuple[str | None, SimulateConfig]:
    """The experiment that settings name, if any, and its configuration."""
    from normlab.dynamics.config import SimulateConfig
    from normlab.dynamics.experiments import EXPERIMENTS

    name = settings.get("experiment")
    if name is not None and name not in EXPERIMENTS:
        raise unknown("experiment", str(name), EXPERIMENTS)
    changes = _known(study, settings, SimulateConfig, {"experiment"})
    return name, EXPERIMENTS[name].defaults.replace(**changes) if name else SimulateConfig(**changes)


def _simulations(study: Study, arm: str, settings: Settings) -> Iterator[Item]:
    name, config = simulation_config(study, settings)

    def call() -> list[Row]:
        from normlab.dynamics.command import run_command

        found = json_values(run_command(name, config).to_dict())
        if name is None:
            return [{"scheme": run["scheme"], "result": run} for run in found["runs"]]
        failed = sum(verdict["agrees"] is False for verdict in found["verdicts"])
        return [{"scheme": name, "disagreements": failed, "result": found}]

    yield Item(f"{arm}/{name or 'simulation'}", arm, name or "simulation", int(settings.get("seed", 0)), call)


def _benches(study: Study, arm: str, settings: Settings) -> Iterator[Item]:
    known = {"schemes": [], "preset": "125m", "batch": 32, "length": 1024, "stream": "bf16", "repeats": 5}
    for name in settings:
        if name not in known:
            raise unknown(f"setting in {study.name}", name, known)
    options = known | dict(settings)

    def call() -> list[Row]:
        from normlab.bench import run

        found = run.step(options["schemes"], **{name: value for name, value in options.items() if name != "schemes"})
        return [json_values(benchmark_row(row)) for row in found]

    yield Item(f"{arm}/bench", arm, "bench", 0, call)


def _known(study: Study, settings: Settings, config: type, others: set[str]) -> dict[str, Any]:
    """The settings that are fields of `config`, with lists as tuples."""
    known = field_names(config)
    for name in settings:
        if name not in known | others:
            raise unknown(f"setting in {study.name}", name, known | others)
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items() if n in known}


def json_values(value: Any) -> Any:
    """A result with numbers rounded to five digits and without figures."""
    if isinstance(value, Mapping):
        return {name: json_values(entry) for name, entry in value.items() if name not in _DROPPED}
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    return digits(value) if isinstance(value, float) else value
