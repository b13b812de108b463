"""The training loop: one run from its configuration to its weights, on one device or many, stopped and resumed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normlab.data import Batch, Corpus, Loader, evaluation_batches, prepare
from normlab.errors import NormLabError
from normlab.locks import hold
from normlab.models.decoder import Decoder
from normlab.train import optimiser as optimisers
from normlab.train import trouble
from normlab.train.checkpoint import Checkpoints
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group, Precision, clip_grad_norm, initialise, reshard, shard, start, stop
from normlab.train.evaluate import evaluate
from normlab.train.folder import RunFolder
from normlab.train.forecast import expectation
from normlab.train.guard import Guard, Verdict
from normlab.train.hardware import describe, matmul_ceiling, peak_memory
from normlab.train.interrupt import Interrupt
from normlab.train.journal import Journal
from normlab.train.meter import Clock, Meter
from normlab.train.profile import profile
from normlab.train.result import Result
from normlab.train.transfer import Transfer
from normlab.train.weights import export_safetensors

_PROFILED = 4
"""Sequences that a per-layer profile is made from."""


class _Step(NamedTuple):
    """A step whose numbers may still be on their way from the device."""

    step: int
    values: torch.Tensor
    """Loss and gradient norm."""
    arrived: Callable[[], Any]
    parts: Sequence[Batch]
    threshold: float
    """The loss beyond which it is a spike."""


class _Ended(Exception):  # noqa: N818  # not an error
    """The run ends before its last step: somebody asked for it, or trouble did."""

    def __init__(self, state: str, reason: str):
        super().__init__(reason)
        self.state, self.reason = state, reason


def train(config: TrainConfig, folder: Path, *, corpus: Corpus | None = None, shown: bool = True) -> Result:
    """Train, or go on with, the run in `folder`; a finished one is only read.

    `shown`: say on standard error what is expected and how it goes. Under torchrun every process calls this.
    """
    group = start(config.device)
    result = _train(config, RunFolder(folder), group, corpus, shown and group.is_main)
    # Not after an error: the others may be anywhere, and would never come to leave together.
    stop(group)
    return result


def _train(config: TrainConfig, folder: RunFolder, group: Group, corpus: Corpus | None, shown: bool) -> Result:
    with ExitStack() as stack:
        group.together(lambda: _claim(folder, config, group, stack) if group.is_main else None)
        if (status := group.broadcast(folder.status))["state"] == "done":
            return Result(**status["result"])
        trainer = Trainer(config, folder, group, corpus, shown)
        stack.callback(trainer.close)
        return trainer.run()


def _claim(folder: RunFolder, config: TrainConfig, group: Group, stack: ExitStack) -> None:
    """Hold the folder and write the configuration down, in one process."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NormLabError(f"cannot make {folder.path}: {error.strerror}; choose another folder with --out") from None
    stack.enter_context(hold(folder.lock))
    folder.begin(config, describe(group.device))


class Trainer:
    """Everything that a run holds, and its loop."""

    def __init__(self, config: TrainConfig, folder: RunFolder, group: Group, corpus: Corpus | None, shown: bool):
        self.group, self.folder, self.shown = group, folder, shown
        self.corpus = corpus or open_corpus(config, shown=shown)
        self.config = config = config.for_vocabulary(self.corpus.tokenizer.vocab_size)
        if config.batch % (config.accumulate * group.world):
            raise NormLabError(
                f"batch {config.batch} cannot be shared by {group.world} processes in {config.accumulate} parts; "
                f"make it a multiple of {group.world * config.accumulate}"
            )
        on_gpu = group.device.type == "cuda"
        self.precision: Precision = config.precision if config.precision != "auto" else ("bf16" if on_gpu else "fp32")
        self.compiles = config.compile == "yes" or (config.compile == "auto" and on_gpu)
        self.ceiling = matmul_ceiling(group.device, torch.bfloat16 if self.precision == "bf16" else torch.float32)
        self.model = self._build()
        whole = self.compiles and group.world == 1
        self.loss: Callable[..., torch.Tensor] = torch.compile(self.model.loss) if whole else self.model.loss
        self.nats = torch.compile(self.model.cross_entropy) if whole else self.model.cross_entropy
        self.optimiser = optimisers.build(
            self.model, kind=config.optimiser, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas,
            eps=config.eps, transfer=self._transfer,
        )  # fmt: skip
        self.guard = Guard(config.trouble, spike=config.spike)
        self.loader = self._loader()
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep, group)
        self.journal = Journal(folder, config, group)
        self.step, self.clock, self.meter = 0, Clock(), self._meter()
        self.waited = 0.0
        """Seconds for which the last step's batch kept the host waiting."""
        self.last_eval: tuple[float, float] | None = None
        # On one GPU the host looks at a step while the next one runs; AdamW's kernel leaves a bad step out by itself.
        self.lags = on_gpu and group.world == 1 and config.optimiser == "adamw"
        self.pending: _Step | None = None
        self.returns: Counter[int] = Counter()
        """How often the run was rolled back to a step."""
        self.interrupt = Interrupt(shown=shown)

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def _transfer(self) -> Transfer | None:
        base = self.config.base_dim
        return None if base is None else Transfer(base, self.config.model.dim)

    def _build(self) -> Decoder:
        model = Decoder(self.config.model, device="meta")
        shard(
            model, self.group, precision=self.precision, checkpointing=self.config.model.checkpointing,
            compile=self.compiles and self.group.world > 1,
        )  # fmt: skip
        initialise(model, self.group, self.config.seed)
        return model if self._transfer is None else self._transfer.init_(model)

    def _loader(self) -> Loader:
        config, group = self.config, self.group
        part = config.batch // (config.accumulate * group.world)
        places = {"rank": group.rank, "world": group.world, "device": group.device, "boundaries": config.boundaries}
        return Loader(self.corpus.train, length=config.length, batch=part, seed=config.seed, **places)

    def _meter(self) -> Meter:
        config = self.config
        flops = config.model.flops_per_token(config.length)
        tokens = config.batch * config.length
        name = f"{config.model.scheme} lr {config.lr:g} seed {config.seed}"
        return Meter(name, config.steps, tokens, flops, self.ceiling * self.group.world, shown=self.shown)

    def expectation(self) -> str:
        """What the run will take, in one line, before it starts."""
        return expectation(self.config, self.group, precision=self.precision, ceiling=self.ceiling)

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """From where the newest checkpoint stands to the end; whatever happens, status.json says how it ended."""
        try:
            self._resume()
            if self.shown:
                self.meter.say(self.expectation())
            self.journal.status("running", self.step)
            return self._result(*self._course())
        except BaseException as error:
            # The disk may be what broke.
            with suppress(NormLabError):
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                self.journal.status(state, self.step, _one_line(error))
            raise

    def _course(self) -> tuple[str, str | None]:
        """State and reason in which the run ends."""
        try:
            with self.interrupt.heard():
                self._loop()
                self._evaluate()
                if self.last_eval is not None and not math.isfinite(self.last_eval[0]):
                    return "failed", f"step {self.step}: the validation loss is {self.last_eval[0]}"
                export_safetensors(self.model, self.folder.weights, {"config": self.config.to_dict()}, self.group)
        except _Ended as ended:
            return ended.state, ended.reason
        return "done", None

    def _resume(self) -> None:
        found = self.checkpoints.load(self.model, self.optimiser)
        if found is None:
            self.journal.forget_after(-1)
            return
        self.step, extra = found
        self.loader.load_state_dict(extra["loader"])
        self.guard.load_state_dict(extra["guard"])
        self.clock.seconds, self.last_eval = extra["seconds"], extra["last_eval"]
        # Last: what cannot be taken up is left as it is.
        self.journal.forget_after(self.step)
        self.journal.event(self.step, "resume", f"from step {self.step}")
        self.meter.say(f"resuming at step {self.step}")

    def _loop(self) -> None:
        last = self.config.steps
        evals, saves = _milestones(self.config.evals, last), _milestones(self.config.saves, last)
        looked_at = evals | saves | {last}
        if self.step == 0:
            self._profile()
        self._clock_on()
        while self.step < last:
            before = self.step
            self._train_step()
            stopping = self._must_stop()
            if stopping or self.step in looked_at:
                self._settle()
                self.clock.stop()
                # A step that was rolled back is not reached; the end has an evaluation of its own, and no checkpoint.
                reached = before < self.step < last
                if reached and self.step in evals:
                    self._evaluate()
                if stopping or (reached and self.step in saves):
                    self._save()
                if stopping:
                    self._stop()
                self._clock_on()
        self.clock.stop()

    def _clock_on(self) -> None:
        """Evaluations and checkpoints are not training."""
        self.clock.start()
        self.meter.restart(self.step)

    def _train_step(self) -> None:
        """One step of the optimiser. Where the host lags, it looks at the step before meanwhile."""
        begin = time.perf_counter()
        parts = [next(self.loader) for _ in range(self.config.accumulate)]
        self.waited = time.perf_counter() - begin
        optimisers.set_lr(self.optimiser, self.config.rate(self.step))
        loss, norm = self._gradient(parts)
        if self._settle():
            # The weights that this gradient belongs to were rolled back.
            self.optimiser.zero_grad(set_to_none=True)
            return
        self.step += 1
        taken = self._sent(loss, norm, parts)
        if self.lags:
            self._update_unless_bad(loss, norm, taken.threshold)
            self.pending = taken
        else:
            self._judge(taken)

    def _gradient(self, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient norm of a batch, still on the device; the gradient is left in the model, clipped."""
        config, total = self.config, torch.zeros((), device=self.group.device)
        for part in parts:
            with self._autocast():
                loss = self.loss(part.inputs, part.targets, documents=part.documents, z_loss=config.z_loss)
            (loss / config.accumulate).backward()
            total += loss.detach() / config.accumulate
        return total, clip_grad_norm(self.model, config.clip)

    def _sent(self, loss: torch.Tensor, norm: torch.Tensor, parts: Sequence[Batch]) -> _Step:
        values = torch.stack([loss.float(), norm.float()])
        here, arrived = _send(values) if self.lags else (values, lambda: None)
        return _Step(self.step, here, arrived, parts, self.guard.threshold())

    def _update_unless_bad(self, loss: torch.Tensor, norm: torch.Tensor, threshold: float) -> None:
        """What the guard will find, found on the device: the same comparisons, in the host's double precision."""
        bad = ~(loss.isfinite() & norm.isfinite()) | (loss.double() > threshold)
        self.optimiser.found_inf = bad.float()  # type: ignore[attr-defined]  # what GradScaler sets, too
        self._update()

    def _settle(self) -> bool:
        """Judge the step that is still on its way, if there is one: has it set the run back?"""
        before = self.step
        if self.pending is not None:
            taken, self.pending = self.pending, None
            self._judge(taken)
        return self.step != before

    def _judge(self, taken: _Step) -> None:
        taken.arrived()
        loss, norm = taken.values.tolist()
        loss = self.group.all_mean(loss)
        verdict = self.guard.judge(loss, norm, threshold=taken.threshold)
        if verdict.is_fine and not self.lags:
            self._update()
        self._record_step(taken.step, loss, norm)
        if not verdict.is_fine:
            self._handle(verdict, taken)

    def _update(self) -> None:
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.model.after_step()

    def _autocast(self) -> Any:
        # FSDP2 casts by its own policy.
        if self.precision == "fp32" or self.group.world > 1:
            return nullcontext()
        return torch.autocast(self.group.device.type, torch.bfloat16)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _handle(self, verdict: Verdict, taken: _Step) -> None:
        """Name the step and the layer, keep the batch, and do as the user chose."""
        if not self.lags:
            # Where the host lags, the gradient that is there by now is the next step's.
            self.optimiser.zero_grad(set_to_none=True)
        found = trouble.diagnose(self.model, taken.parts, self.group, self._autocast)
        detail = f"step {taken.step}: {verdict.detail}; {found}"
        self.journal.event(taken.step, verdict.kind, detail, layer=found.layer)
        trouble.keep(taken.parts, self.folder.trouble, taken.step, self.group.rank)
        if verdict.action == "stop":
            raise _Ended("failed", detail)
        self.meter.say(f"{detail}; {verdict.action}")
        if verdict.action == "rollback":
            self._roll_back(taken.step)
        else:
            self.journal.event(taken.step, "skip", "the weights stay as they were")

    def _roll_back(self, step: int) -> None:
        """Weights and optimiser from the last checkpoint; the data goes on, past the batch that did it."""
        found = self.checkpoints.load(self.model, self.optimiser)
        if found is None:
            self.journal.event(step, "skip", "there is no checkpoint to go back to yet")
            return
        self.step, extra = found
        self.guard.rewind(extra["guard"])
        self.meter.restart(self.step)
        self.journal.event(step, "rollback", f"from step {step} to step {self.step}")
        self.returns[self.step] += 1
        if self.returns[self.step] == self.guard.limit:
            raise _Ended("failed", f"step {step}: rolled back to step {self.step} {self.guard.limit} times")

    # -- what is kept ------------------------------------------------------------------------------------------------

    def _record_step(self, step: int, loss: float, norm: float) -> None:
        record = {
            "kind": "step", "step": step, "tokens": self.journal.tokens(step), "loss": loss,
            "lr": self.config.lr * self.config.rate(step - 1), "grad_norm": norm, **self.meter.speed(step),
            "seconds": self.clock.seconds, "waited": self.waited, "memory_bytes": peak_memory(self.group.device),
        }  # fmt: skip
        self.journal.write(record)
        self.meter.show(step, record)

    def _evaluate(self) -> None:
        with self._autocast():
            self.last_eval = evaluate(self.nats, self.corpus.val, self.config, self.group)
        reshard(self.model)
        loss, bits = self.last_eval
        tokens = self.journal.tokens(self.step)
        self.journal.write({"kind": "eval", "step": self.step, "tokens": tokens, "loss": loss, "bits_per_byte": bits})
        self._profile()
        self.journal.flush()

    def _profile(self) -> None:
        sequences = min(_PROFILED, self.config.batch)
        batches = evaluation_batches(
            self.corpus.val, length=self.config.length, batch=sequences, device=self.group.device,
            boundaries=self.config.boundaries,
        )  # fmt: skip
        batch = next(batches)
        with self._autocast():
            found = profile(self.model, batch.inputs, batch.targets, documents=batch.documents)
        reshard(self.model)
        self.journal.write({"kind": "profile", "step": self.step, **found})

    def _save(self) -> None:
        extra = {
            "loader": self.loader.state_dict(), "guard": self.guard.state_dict(), "seconds": self.clock.seconds,
            "last_eval": self.last_eval,
        }  # fmt: skip
        self.journal.flush()
        self.checkpoints.save(self.step, model=self.model, optimiser=self.optimiser, extra=extra)
        self.journal.status("running", self.step)

    def _result(self, state: str, reason: str | None) -> Result:
        """Write down how the run ended; what only a run that goes on needs is removed last."""
        loss, bits = self.last_eval or (None, None)
        tokens, seconds, device = self.journal.tokens(self.step), self.clock.seconds, self.group.device
        speed = tokens / seconds if seconds else 0.0
        result = Result(
            state, reason, loss, bits, self.step, tokens, seconds, speed, peak_memory(device), describe(device)
        )
        if self.group.is_main:
            self.corpus.tokenizer.save(self.folder.tokenizer)
            self.journal.status(state, self.step, reason, result=result.to_dict())
            if state == "done":
                self.folder.drop_checkpoints()
        return result

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        return self.group.agree(self.interrupt.reason is not None)

    def _stop(self) -> None:
        reason = self.interrupt.reason or "another process was asked to stop"
        self.journal.event(self.step, "saved", reason)
        raise _Ended("stopped", reason)

    def close(self) -> None:
        """End threads and put metrics on the disk; one that fails does not keep the others open."""
        with ExitStack() as stack:
            for part in (self.journal, self.meter, self.loader):
                stack.callback(part.close)


def open_corpus(config: TrainConfig, *, shown: bool = False) -> Corpus:
    """The text of a run, tokenized."""
    options = {"tokenizer": config.tokenizer, "val_data": config.val_data, "val_fraction": config.val_fraction}
    return prepare(config.data, **options, progress=shown)


def _milestones(count: int, steps: int) -> set[int]:
    """`count` steps, evenly spread, the last of all among them."""
    return {max(1, steps * i // count) for i in range(1, count + 1)}


def _send(values: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Memory of the host that a GPU will have written to once the call returns, and that call."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize


def _one_line(error: BaseException) -> str:
    """What went wrong, with the kind of it where that was not foreseen."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NormLabError) else f"{type(error).__name__}: {text}".rstrip(": ")
