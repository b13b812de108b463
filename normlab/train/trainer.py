"""The training loop of one run, on one device or many, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from normlab.data import IGNORED, Batch
from normlab.errors import NormLabError
from normlab.train import optimiser as optimisers
from normlab.train.branch import Branch
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group, clip_grad_norm, start, stop
from normlab.train.evaluate import Scores
from normlab.train.hardware import describe
from normlab.train.monitor import recovery
from normlab.train.monitor.recovery import Ended, Taken
from normlab.train.monitor.start import first_loss
from normlab.train.monitor.stuck import look
from normlab.train.plan import Milestones
from normlab.train.records import Recorder
from normlab.train.result import TrainResult
from normlab.train.setup import open_data
from normlab.train.step_graph import StepGraphs, record_cuda
from normlab.train.storage.folder import ENDED, RunFolder
from normlab.train.storage.weights import export_safetensors
from normlab.train.tasks import Data
from normlab.utils.host_copy import HostCopy
from normlab.utils.locks import hold
from normlab.utils.results_folder import RUN, refuse_other_results


def train(
    config: TrainConfig,
    folder: Path,
    *,
    data: Data | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
    continuable: bool = False,
    branch_from: Path | None = None,
) -> TrainResult:
    """Train or resume the run in `folder` and return its result; the result of a finished run is read.

    `progress`: print expected cost and progress to standard error. `command`: recorded in config.json for the report.
    `continuable`: keep the last checkpoint, from which the run can be continued with a larger budget. `branch_from`:
    folder of a trunk, a longer run with this one's budget among its `branches`; the run starts from the state that the
    trunk kept and not at step 0. Under torchrun every process calls this.
    """
    config.model.check_start()
    refuse_other_results(folder, RUN)
    group = start(config.device)
    run = RunFolder(folder, command)
    result = _train(config, run, group, data, progress and group.is_main, continuable, branch_from)
    # Not after an error: the other ranks may be anywhere, and this would wait for them.
    stop(group)
    return result


def _train(
    config: TrainConfig,
    folder: RunFolder,
    group: Group,
    data: Data | None,
    progress: bool,
    continuable: bool,
    trunk: Path | None,
) -> TrainResult:
    trunk = trunk or folder.trunk
    branch = None if trunk is None or folder.is_resumable else Branch.of(trunk, config)
    with ExitStack() as stack:
        if not group.broadcast(folder.has_begun):
            # Before the folder is made: a run that is refused leaves nothing behind.
            data = open_data(config, group, data, progress=progress)
        group.together(lambda: _claim(folder, config, group, stack, branch) if group.is_main else None)
        if (status := group.broadcast(folder.status))["state"] in ENDED:
            return TrainResult.from_dict(status["result"])
        trainer = Trainer(config, folder, group, data, progress)
        stack.callback(trainer.close)
        trainer.continuable = continuable
        return trainer.run()


def _claim(folder: RunFolder, config: TrainConfig, group: Group, stack: ExitStack, branch: Branch | None) -> None:
    """Lock the folder and write config.json, in one process; a branch gets the state that its trunk kept."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NormLabError(f"cannot make {folder.path}: {error.strerror}; choose another folder with --out") from None
    stack.enter_context(hold(folder.lock))
    folder.begin(config, describe(group.device), **({} if branch is None else branch.facts))
    if branch is not None:
        branch.plant(folder)


class Trainer(Recorder):
    """A run in progress."""

    def __init__(self, config: TrainConfig, folder: RunFolder, group: Group, data: Data | None, progress: bool):
        super().__init__(config, folder, group, data, progress)
        self.pending: Taken | None = None
        """A step whose loss the host has not read yet."""
        # Looked up at each call, not bound here.
        work = (lambda parts: self._gradient(parts), lambda *values: self._update_on_device(*values))
        self.graphs = StepGraphs(self, *work, record=record_cuda if self.uses_graphs else None)

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train from the newest checkpoint to the end; status.json is written whatever happens."""
        try:
            self._resume()
            if self.progress:
                self.meter.say(self.expectation())
            self.journal.status("running", self.step)
            if self.group.is_main:
                # Now, not at the end: checkpoints can then be used during the run.
                self.task.keep(self.data, self.folder)
            return self._result(*self._train_to_end())
        except BaseException as error:
            # The disk may be what broke.
            with suppress(NormLabError):
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                self.journal.status(state, self.step, _one_line(error))
            raise

    def _train_to_end(self) -> tuple[str, str | None]:
        """Train, and return the final state with its reason; a run that ends before its last step is stuck."""
        try:
            with self.interrupt.heard():
                # A run that was killed after it had ended early trains no further; a continued one does.
                if self.ended_at != self.step or self.step in self.config.continued:
                    self._loop()
                # A run that was killed while it ended has these records already.
                if self.ended_at != self.step:
                    self._measure_at_end()
                if not math.isfinite(loss := self.last_eval["loss"]):
                    self.diverged = self.step
                    return "failed", f"step {self.step}: the validation loss is {loss}"
                export_safetensors(self.model, self.folder.weights, {"config": self.config.to_dict()}, self.group)
                if self.continuable:
                    self.checkpoints.keep = 1
                    self._save()
        except Ended as ended:
            self.diverged = ended.diverged
            return ended.state, ended.reason
        return ("done", None) if self.step == self.config.steps else ("stuck", f"{self.watch}; stopped early")

    def _measure_at_end(self) -> None:
        if self.step == self.config.steps:
            self._evaluate()
            look(self, self.last_eval["loss"])
        self._profile()
        self.ended_at = self.step

    def _resume(self) -> None:
        found = self.checkpoints.load(self.model, self.optimiser)
        if found is None:
            self.journal.forget_after(-1)
            return
        self.step, extra = found
        self.loader.load_state_dict(extra["loader"])
        self.guard.load_state_dict(extra["guard"])
        self.clock.seconds, self.last_eval = extra["seconds"], _scores(extra["last_eval"])
        self.watch.load_state_dict(extra.get("watch", {}))
        self.first_loss, self.ended_at = extra.get("first_loss"), extra.get("ended_at")
        self._keep_branch(only_missing=True)
        # Last: if the checkpoint cannot be loaded, the records stay as they are.
        self.journal.forget_after(self.step)
        self.journal.event(self.step, "resume", f"from step {self.step}")
        self.meter.say(f"resuming at step {self.step}")

    def _loop(self) -> None:
        last, plan = self.config.steps, Milestones.of(self.config)
        looked_at = plan.all | {last, self.watch.due}
        if self.step == 0:
            self._profile()
            self.first_loss = first_loss(self, self._few_samples())
        self._clock_on()
        while self.step < last:
            before = self.step
            self._train_step()
            stopping = self._must_stop()
            if stopping or self.step in looked_at:
                self._judge_pending()
                self.clock.stop()
                # A step that was rolled back is not reached; the end has an evaluation of its own, and no checkpoint.
                reached = before < self.step < last
                in_doubt = self.step == self.watch.due and self.watch.is_doubtful
                if reached and (self.step in plan.evals or in_doubt):
                    self._evaluate()
                if reached and in_doubt and look(self, self.last_eval["loss"]) and self.config.stop_hopeless:
                    break
                if reached and self.step in plan.profiles:
                    self._profile()
                if stopping or (reached and self.step in plan.saves | plan.branches):
                    self._save()
                if stopping:
                    self._stop()
                self._clock_on()
        self.clock.stop()

    def _clock_on(self) -> None:
        """Start timing: evaluations and checkpoints do not count as training."""
        self.clock.start()
        self.meter.restart(self.step)

    def _train_step(self) -> None:
        """One optimiser step. Where the host lags behind the GPU, it judges the previous step meanwhile."""
        begin = time.perf_counter()
        parts = [next(self.loader) for _ in range(self.config.accumulate)]
        self.waited = time.perf_counter() - begin
        graphs = self.graphs.ready(parts)
        optimisers.set_lr(self.optimiser, self.config.rate(self.step))
        loss, norm = graphs.gradient(parts) if graphs is not None else self._gradient(parts)
        if self._judge_pending():
            # The weights that this gradient belongs to were rolled back.
            self.optimiser.zero_grad(set_to_none=True)
            return
        self.step += 1
        taken = self._sent(loss, norm, parts)
        if self.lags:
            if graphs is not None:
                graphs.update(taken.threshold)
            else:
                self._update_on_device(loss, norm, taken.threshold)
            self.pending = taken
        else:
            self._judge(taken)

    def _gradient(self, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient norm of a batch, on the device; the clipped gradient is left in the model."""
        config, total = self.config, torch.zeros((), device=self.group.device)
        for part, share in zip(parts, self._shares(parts), strict=True):
            with self.autocast():
                loss = self.loss(part.inputs, part.targets, **part.options, z_loss=config.z_loss)
            (loss * share).backward()
            total += loss.detach() * share
        return total, clip_grad_norm(self.model, config.clip)

    def _shares(self, parts: Sequence[Batch]) -> torch.Tensor:
        """Weight of the mean loss of each part, proportional to its number of targets.

        Multiplied by the number of processes, since FSDP averages gradients over them.
        """
        counts = torch.stack([(part.targets != IGNORED).sum() for part in parts])
        return counts * self.group.world / self.group.sum(counts.sum()).clamp(min=1)

    def _sent(self, loss: torch.Tensor, norm: torch.Tensor, parts: Sequence[Batch]) -> Taken:
        values = HostCopy(torch.stack([loss.float(), norm.float()]))
        return Taken(self.step, values, parts, self.guard.threshold())

    def _update_on_device(self, loss: torch.Tensor, norm: torch.Tensor, threshold: float | torch.Tensor) -> None:
        """Step unless the guard will reject it, decided on the device: the same comparisons, in double precision."""
        if self.config.trouble != "none":
            bad = ~(loss.isfinite() & norm.isfinite()) | (loss.double() > threshold)
            self.optimiser.found_inf = bad.float()  # type: ignore[attr-defined]  # what GradScaler sets, too
        self._update()

    def _judge_pending(self) -> bool:
        """Judge the pending step, if there is one. Returns whether that rolled the run back."""
        before = self.step
        if self.pending is not None:
            taken, self.pending = self.pending, None
            self._judge(taken)
        return self.step != before

    def _judge(self, taken: Taken) -> None:
        loss, norm = taken.values.wait().tolist()
        loss = self.group.all_mean(loss)
        verdict = self.guard.judge(loss, norm, threshold=taken.threshold)
        # Loss and gradient both zero: no token of the step was masked, so there is no loss.
        measured = bool(loss or norm)
        if verdict.is_fine and measured:
            self.watch.take(loss)
        if verdict.action == "go" and not self.lags:
            self._update()
        self._record_step(taken.step, loss if measured else math.nan, norm)
        if not verdict.is_fine:
            recovery.handle(self, verdict, taken)

    def _update(self) -> None:
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.model.after_step()

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        return self.group.agree(self.interrupt.reason is not None)

    def _stop(self) -> None:
        reason = self.interrupt.reason or "another process was asked to stop"
        self.journal.event(self.step, "saved", reason)
        raise Ended("stopped", reason)


def _scores(saved: Any) -> Scores:
    """The last evaluation in a checkpoint; version 0.1 stored a pair."""
    return dict(zip(("loss", "bits_per_byte"), saved, strict=True)) if isinstance(saved, list) else dict(saved or {})


def _one_line(error: BaseException) -> str:
    """An error as one line, with its type if it is not a NormLabError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NormLabError) else f"{type(error).__name__}: {text}".rstrip(": ")
