"""Resume a run from its folder alone, or continue a finished one with a larger budget.

A continued run starts from the last checkpoint of the finished one. Its learning-rate schedule is stretched over all
steps, so the rate jumps up to that of a run of the new length. The result differs from a run with the larger budget
from the start; `TrainConfig.continued` records it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from normlab.errors import NormLabError
from normlab.train.config import TrainConfig
from normlab.train.distributed import start
from normlab.train.storage.checkpoint import Checkpoints
from normlab.train.storage.folder import RunFolder, difference
from normlab.utils.files import read_json, write_json
from normlab.utils.locks import hold


def resumed(path: Path, config: TrainConfig) -> TrainConfig:
    """The configuration to resume the run in `path` with; `config` is its own with the user's changes.

    If the budget of a finished run was raised, its folder is prepared to be continued. Under torchrun every process
    calls this.
    """
    folder = RunFolder(path)
    there = folder.config
    if config.identity == there.identity:
        return config
    if not _differ_in_budget_only(there, config):
        raise NormLabError(
            f"{path} holds another run ({difference(there, config)}); with --resume only the budget can be changed"
        )
    _check(folder, there, config)
    longer = dataclasses.replace(config, continued=(*there.continued, there.steps))
    group = start(config.device)
    # Every process has read the folder before the first one writes to it.
    group.gather(None)
    group.together(lambda: _prepare(folder, there, longer) if group.is_main else None)
    return longer


def _prepare(folder: RunFolder, there: TrainConfig, longer: TrainConfig) -> None:
    path = folder.path
    with hold(folder.lock):
        write_json(path / "config.json", read_json(path / "config.json") | {"config": longer.to_dict()})
        folder.set_status("stopped", step=there.steps, of=longer.steps, reason="to be continued")
    print(_announcement(path, there, longer), file=sys.stderr)


def _differ_in_budget_only(there: TrainConfig, config: TrainConfig) -> bool:
    if config.task != there.task:
        return False
    longer = dataclasses.replace(there, **{there.budget: getattr(config, there.budget)})
    return longer.identity == config.identity


def _check(folder: RunFolder, there: TrainConfig, config: TrainConfig) -> None:
    path = folder.path
    if (state := folder.status["state"]) != "done":
        raise NormLabError(
            f"{path} is {state}, and only a finished run can be continued with more; finish it first: "
            f"normlab train --resume {path}"
        )
    if config.steps <= there.steps:
        raise NormLabError(f"{path} has {there.steps:,} steps, not fewer than {config.steps:,}; name a larger budget")
    newest = Checkpoints(folder.checkpoints).latest()
    if newest is None or newest.name != f"step-{there.steps:08d}":
        raise NormLabError(
            f"{path} cannot be continued: the optimiser's state at its end was not kept (runs of normlab compare, with "
            f"--saves 0, or of an older version do not); train anew with the larger budget"
        )


def _announcement(path: Path, there: TrainConfig, longer: TrainConfig) -> str:
    step = there.steps
    before, after = there.lr * there.rate(step - 1), longer.lr * longer.rate(step)
    return (
        f"continuing {path} from step {step:,} to {longer.steps:,}: the {longer.schedule} schedule is stretched over "
        f"all steps, so the rate goes from {before:.2g} to {after:.2g}; a run of {longer.steps:,} steps from the start "
        f"would be another one"
    )
