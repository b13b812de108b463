"""Branches: runs with smaller budgets that start from a checkpoint of a longer run, the trunk (arXiv 2405.18392).

The rate of a trunk is constant after warm-up (schedule wsd). Where a run of a smaller budget would begin to decay,
`TrainConfig.branch_step`, the trunk keeps its whole state: weights, optimiser, position in the data, random states,
monitors. A branch starts from there. Nothing before that step depends on the budget, so on a CPU the branch equals, bit
for bit, the run that had the smaller budget from the start, and has its name.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.train.config import TrainConfig
from normlab.train.monitor.stuck import PATIENCE
from normlab.train.plan import Milestones
from normlab.train.storage import branches
from normlab.train.storage.folder import RunFolder, difference
from normlab.train.storage.sinks import read_records
from normlab.utils.files import write_atomically

MAY_DIFFER = ("evals", "device")
"""Fields in which a branch may differ from its trunk, besides the budget and what is not part of a run's identity."""


@dataclass(frozen=True)
class Branch:
    """Where a run starts: a checkpoint of its trunk, and the trunk's records up to there."""

    trunk: RunFolder
    config: TrainConfig
    checkpoint: Path

    @classmethod
    def of(cls, trunk: Path, config: TrainConfig) -> Branch:
        """The branch of a trunk for a configuration; raises if the trunk is another run or has not kept the state."""
        folder = RunFolder(trunk)
        _check_config(folder, config)
        return cls(folder, config, _checkpoint(folder, config))

    @property
    def facts(self) -> dict[str, Any]:
        """For config.json."""
        return {"branch": {"trunk": str(self.trunk.path.resolve()), "step": self.config.branch_step}}

    def plant(self, folder: RunFolder) -> None:
        """Copy records and checkpoint into the folder of the branch: it is then resumed like any run.

        The checkpoint comes last: without it, the folder has not begun.
        """
        records = self._records()
        write_atomically(folder.metrics, "".join(json.dumps(record) + "\n" for record in records))
        # With the vocabulary that the data gave the trunk's model.
        model = TrainConfig.from_dict(branches.config_of(self.checkpoint)).model
        branches.plant(self.checkpoint, folder.checkpoints, dataclasses.replace(self.config, model=model).to_dict())

    def _records(self) -> list[dict[str, Any]]:
        """The trunk's records up to the branch; of evaluations and profiles those that the branch alone would have."""
        step, own = self.config.branch_step, Milestones.of(self.config)
        records = [record for record in read_records(self.trunk.metrics) if record.get("step", 0) <= step]
        trained = sum(record["kind"] == "step" for record in records)
        if trained != step:
            raise NormLabError(
                f"{self.trunk.metrics} has records of {trained:,} of the {step:,} steps before the branch; let the "
                f"trunk go on first: normlab train --resume {self.trunk.path}"
            )
        steps = {"eval": own.evals | {self.config.warmup_steps + PATIENCE}, "profile": own.profiles | {0}}
        kept = [record for record in records if record["step"] in steps.get(record["kind"], (record["step"],))]
        origin = f"from step {step} of {self.trunk.path.name}"
        return [*kept, {"kind": "event", "step": step, "what": "branch", "layer": None, "detail": origin}]


def _check_config(trunk: RunFolder, config: TrainConfig) -> None:
    there = trunk.config
    if config.branches:
        raise NormLabError("a branch has no branches of its own; name all budgets as branches of the trunk")
    if config.task != there.task:
        raise NormLabError(
            f"{trunk.path} is not a trunk of this run ({difference(there, config)}); name a run of its task"
        )
    own, longest = getattr(config, config.budget), getattr(there, there.budget)
    if own >= longest:
        raise NormLabError(
            f"{trunk.path} has {longest:,} {config.budget} and a branch fewer, got {own:,}; name a smaller budget"
        )
    if there.continued:
        raise NormLabError(
            f"{trunk.path} was continued after its rate had decayed, so it is not a trunk; train it anew with the "
            "larger budget"
        )
    same = dataclasses.replace(there.branch(own), **{name: getattr(config, name) for name in MAY_DIFFER})
    if same.identity != config.identity:
        raise NormLabError(
            f"{trunk.path} is not a trunk of this run ({difference(same, config)}); a branch has its trunk's settings "
            f"but for {config.budget}, evals and saves"
        )


def _checkpoint(trunk: RunFolder, config: TrainConfig) -> Path:
    found = trunk.branches / f"step-{config.branch_step:08d}"
    if not found.is_dir():
        there = ", ".join(str(int(path.name.removeprefix("step-"))) for path in sorted(trunk.branches.glob("step-*")))
        status, budget = trunk.status, f"{getattr(config, config.budget):,} {config.budget}"
        raise NormLabError(
            f"{trunk.path} (it is {status['state']}, at step {status.get('step', 0):,}) has kept no state at step "
            f"{config.branch_step:,}, where a run of {budget} branches off, only at {there or 'none'}; train it with "
            f"that budget among its branches"
        )
    return found
