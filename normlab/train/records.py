"""What a run records: steps, evaluations, profiles, checkpoints, the states that branches start from, its result."""

from __future__ import annotations

from normlab.data import Batch
from normlab.probes.sensitivity import sensitivity
from normlab.probes.sharded import reshard
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.evaluate import Scores, evaluate, evaluate_sets
from normlab.train.hardware import describe, identity
from normlab.train.monitor.profile import profile
from normlab.train.result import TrainResult
from normlab.train.setup import Setup
from normlab.train.storage import branches
from normlab.train.storage.folder import ENDED, RunFolder
from normlab.train.tasks import Data

_PROFILED = 4
"""Samples in the batch of a per-layer profile."""


class Recorder(Setup):
    """The objects of a run, and what it records."""

    def __init__(self, config: TrainConfig, folder: RunFolder, group: Group, data: Data | None, progress: bool):
        super().__init__(config, folder, group, data, progress)
        self.waited = 0.0
        """Seconds that the host waited for the batch of the last step."""
        self.last_eval: Scores = {}
        self.ended_at: int | None = None
        """The last step of the run, once the model has been evaluated and profiled after it."""
        self.first_loss: float | None = None
        self.diverged: int | None = None
        """The step at which training diverged."""
        self.continuable = False
        """Whether the last checkpoint is kept when the run is done."""

    def _record_step(self, step: int, loss: float, norm: float) -> None:
        record = {
            "kind": "step", "step": step, "tokens": self.journal.tokens(step), "loss": loss,
            "lr": self.config.lr * self.config.rate(step - 1), "grad_norm": norm, **self.meter.speed(step),
            "seconds": self.clock.seconds, "waited": self.waited, "memory_bytes": self.memory.recent,
        }  # fmt: skip
        self.journal.write(record)
        self.meter.show(step, record, self.watch.note)

    def _evaluate(self) -> None:
        """Evaluate the model; after the last step on the further validation sets as well."""
        measured, options = (self.measure, self.data, self.config, self.group), {"progress": self.meter.evaluating}
        with self.autocast():
            self.last_eval = evaluate(*measured, **options)
            if self.step == self.config.steps:
                self.last_eval |= evaluate_sets(*measured, **options)
        reshard(self.model)
        place = {"step": self.step, "tokens": self.journal.tokens(self.step)}
        self.journal.write({"kind": "eval", **place, **self.last_eval})
        self.journal.flush()

    def _few_samples(self) -> Batch:
        samples = min(_PROFILED, self.config.batch)
        return self.task.few_samples(self.config, self.data, samples, device=self.group.device)

    def _profile(self) -> None:
        batch = self._few_samples()
        with self.autocast():
            found = profile(self.model, batch.inputs, batch.targets, **batch.options)
            found["sensitivity"] = sensitivity(self.model, batch.inputs, **batch.options)
            found |= self.task.copying(self.model, batch)
        reshard(self.model)
        self.journal.write({"kind": "profile", "step": self.step, **found})

    def _save(self) -> None:
        extra = {
            "loader": self.loader.state_dict(), "guard": self.guard.state_dict(), "seconds": self.clock.seconds,
            "last_eval": self.last_eval, "first_loss": self.first_loss, "watch": self.watch.state_dict(),
            "ended_at": self.ended_at, "config": self.config.to_dict(),
        }  # fmt: skip
        self.journal.flush()
        self.checkpoints.save(self.step, model=self.model, optimiser=self.optimiser, extra=extra)
        self._keep_branch()
        self.journal.status("running", self.step)

    def _keep_branch(self, *, only_missing: bool = False) -> None:
        """Keep the checkpoint of this step if a branch starts from here."""
        if self.step in self.config.branch_steps:
            self.group.together(lambda: self._copy_branch(only_missing) if self.group.is_main else None)

    def _copy_branch(self, only_missing: bool) -> None:
        name = f"step-{self.step:08d}"
        if not (only_missing and (self.folder.branches / name).is_dir()):
            branches.keep(self.folder.checkpoints / name, self.folder.branches)

    def _result(self, state: str, reason: str | None) -> TrainResult:
        """Write the result to status.json; then remove the checkpoints of a finished run."""
        tokens, seconds, device = self.journal.tokens(self.step), self.clock.seconds, self.group.device
        result = TrainResult(
            state=state, reason=reason, scores=self.last_eval, steps=self.step, tokens=tokens, seconds=seconds,
            tokens_per_s=tokens / seconds if seconds else 0.0, peak_bytes=self.memory.now, device=describe(device),
            gpu=identity(device), first_loss=self.first_loss, unigram_entropy=self.watch.entropy,
            stuck=True if self.watch.is_stuck else False if state == "done" else None,
            stuck_at=self.watch.at, diverged=self.diverged,
        )  # fmt: skip
        if self.group.is_main:
            self.journal.status(state, self.step, reason, result=result.to_dict())
            if state in ENDED and not self.continuable:
                self.folder.drop_checkpoints()
        return result
