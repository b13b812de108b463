"""The training loop: one run from its configuration to its weights, on one device or many, stopped and resumed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from normlab.data import Batch, Corpus, Loader, evaluation_batches, prepare
from normlab.errors import NormLabError
from normlab.files import replacing
from normlab.locks import hold
from normlab.models.decoder import Decoder
from normlab.train import optimiser as optimisers
from normlab.train.checkpoint import Checkpoints, export_safetensors
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group, Precision, clip_grad_norm, initialise, reshard, shard, start, stop
from normlab.train.evaluate import evaluate
from normlab.train.folder import RunFolder
from normlab.train.guard import Guard, Verdict, first_nonfinite
from normlab.train.hardware import describe, matmul_ceiling, peak_memory
from normlab.train.meter import Meter
from normlab.train.profile import profile
from normlab.train.sinks import JsonLines, open_sinks
from normlab.train.transfer import Transfer

_USUAL_SHARE = 0.4
"""Of the matrix-product ceiling that a run reaches, for the first guess at its time."""
_PROFILED = 4
"""Sequences that a per-layer profile is made from."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    state: str
    """done, stopped or failed."""
    reason: str | None
    loss: float | None
    """Last evaluation, in nats a token."""
    bits_per_byte: float | None
    steps: int
    tokens: int
    seconds: float
    """Of training, over all its sessions."""
    tokens_per_s: float
    peak_bytes: int | None
    device: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Step(NamedTuple):
    """A step whose numbers may still be on their way from the device."""

    step: int
    values: torch.Tensor
    """Loss and gradient norm."""
    arrived: Callable[[], Any]
    batch: Batch
    threshold: float


class _Stopped(Exception):  # noqa: N818  # not an error
    """Somebody asked the run to stop, or trouble did."""

    def __init__(self, state: str, reason: str):
        super().__init__(reason)
        self.state, self.reason = state, reason


def train(config: TrainConfig, folder: Path, *, corpus: Corpus | None = None, shown: bool = True) -> Result:
    """Train, or go on with, the run in `folder`; a finished one is only read.

    `shown`: say on standard error what is expected and how it goes. Under torchrun every process calls this.
    """
    group = start(config.device)
    try:
        return _train(config, RunFolder(folder), group, corpus, shown and group.is_main)
    finally:
        stop(group)


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
        self.corpus = corpus or _prepare(config, shown)
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
        transfer = self._transfer
        self.optimiser = optimisers.build(
            self.model, kind=config.optimiser, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas,
            eps=config.eps, transfer=transfer,
        )  # fmt: skip
        self.guard = Guard(config.trouble, spike=config.spike)
        self.loader = self._loader()
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep, group)
        self.sinks = open_sinks(config.sinks, folder.path, config.to_dict()) if group.is_main else []
        self.step, self.seconds, self._began = 0, 0.0, time.perf_counter()
        self.last_eval: tuple[float, float] | None = None
        self.meter = self._meter()
        # On one GPU the host looks at a step while the next one runs; AdamW's kernel leaves a bad step out by itself.
        self.lags = on_gpu and group.world == 1 and config.optimiser == "adamw"
        self.pending: _Step | None = None
        self.asked_to_stop: str | None = None

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
        config = self.config
        part = config.batch // (config.accumulate * self.group.world)
        memory = config.model.memory(part, config.length, precision=self.precision).total
        work = config.model.flops_per_token(config.length) * config.steps * config.batch * config.length
        seconds = work / (_USUAL_SHARE * self.ceiling * self.group.world)
        return (
            f"{config.model.num_params():,} parameters, {config.steps:,} steps of {config.batch} × {config.length} "
            f"tokens on {describe(self.group.device)} ({self.ceiling / 1e12:.3g} TFLOP/s in products); "
            f"expect about {memory / 2**30:.2f} GiB and {_duration(seconds)}"
        )

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """From where the newest checkpoint stands to the end."""
        self._resume()
        if self.shown:
            self.meter.say(self.expectation())
        self._note_status("running")
        try:
            with self._signals():
                self._loop()
                self._evaluate()
                result = self._result("done", None)
                export_safetensors(self.model, self.folder.weights, {"config": self.config.to_dict()}, self.group)
        except _Stopped as stopped:
            if stopped.state == "stopped":
                self._save()
            result = self._result(stopped.state, stopped.reason)
        if self.group.is_main:
            self.corpus.tokenizer.save(self.folder.tokenizer)
        self._note_status(result.state, result=result.to_dict())
        if result.state == "done" and self.group.is_main:
            self.folder.drop_checkpoints()
        return result

    def _resume(self) -> None:
        found = self.checkpoints.load(self.model, self.optimiser)
        if found is not None:
            self.step, extra = found
            self.loader.load_state_dict(extra["loader"])
            self.guard.load_state_dict(extra["guard"])
            self.seconds, self.last_eval = extra["seconds"], extra["last_eval"]
            self.meter.say(f"resuming at step {self.step}")
        for sink in self.sinks:
            if isinstance(sink, JsonLines):
                sink.truncate_after(self.step if found is not None else -1)

    def _loop(self) -> None:
        config = self.config
        evals, saves = _milestones(config.evals, config.steps), _milestones(config.saves, config.steps)
        if self.step == 0:
            self._profile()
        self._clock_on()
        while self.step < config.steps:
            self._train_step()
            if self.step in evals - {config.steps} or self.step in saves - {config.steps} or self._must_stop():
                self._finish_step()
                self._clock_off()
                if self.step in evals - {config.steps}:
                    self._evaluate()
                if self._must_stop():
                    raise _Stopped("stopped", self.asked_to_stop or "another process was asked to stop")
                if self.step in saves:
                    self._save()
                self._clock_on()
        self._finish_step()
        self._clock_off()

    def _clock_on(self) -> None:
        """Evaluations and checkpoints are not training."""
        self._began = time.perf_counter()
        self.meter.restart(self.step)

    def _clock_off(self) -> None:
        self.seconds += time.perf_counter() - self._began

    def _train_step(self) -> None:
        """One step of the optimiser. Where the host lags, it looks at the step before meanwhile."""
        config, parts = self.config, [next(self.loader) for _ in range(self.config.accumulate)]
        optimisers.set_lr(self.optimiser, config.rate(self.step))
        total = torch.zeros((), device=self.group.device)
        for part in parts:
            with self._autocast():
                loss = self.loss(part.inputs, part.targets, documents=part.documents, z_loss=config.z_loss)
            (loss / config.accumulate).backward()
            total += loss.detach() / config.accumulate
        norm = clip_grad_norm(self.model, config.clip)
        self.step += 1
        if self.lags:
            self._finish_step()
        taken = self._sent(total, norm, parts[-1])
        if self.lags:
            bad = ~(total.isfinite() & norm.isfinite()) | (total > taken.threshold)
            self.optimiser.found_inf = bad.float()  # type: ignore[attr-defined]  # what GradScaler sets, too
            self._update()
            self.pending = taken
        else:
            self._judge(taken)

    def _sent(self, loss: torch.Tensor, norm: torch.Tensor, batch: Batch) -> _Step:
        values = torch.stack([loss.float(), norm.float()])
        if not self.lags:
            return _Step(self.step, values, lambda: None, batch, self.guard.threshold())
        host = torch.empty(2, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Step(self.step, host, event.synchronize, batch, self.guard.threshold())

    def _finish_step(self) -> None:
        """Judge what is still on its way."""
        if self.pending is not None:
            taken, self.pending = self.pending, None
            self._judge(taken)

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
        self.optimiser.zero_grad(set_to_none=True)
        with self._autocast():
            found = first_nonfinite(
                self.model, taken.batch.inputs, taken.batch.targets, documents=taken.batch.documents
            )
        reshard(self.model)
        detail = f"step {taken.step}: {verdict.detail}; {found}"
        self._event(taken.step, verdict.kind, found.layer, detail)
        self._keep_batch(taken)
        if verdict.action == "stop":
            raise _Stopped("failed", detail)
        self.meter.say(f"{detail}; {verdict.action}")
        if verdict.action == "rollback":
            self._roll_back(taken.step)

    def _roll_back(self, step: int) -> None:
        """Weights and optimiser from the last checkpoint; the data goes on, past the batch that did it."""
        found = self.checkpoints.load(self.model, self.optimiser)
        if found is None:
            self._event(step, "skip", None, "there is no checkpoint to go back to yet")
            return
        self.step, extra = found
        self.guard.rewind(extra["guard"])
        self._event(self.step, "rollback", None, f"from step {step} to step {self.step}")

    def _keep_batch(self, taken: _Step) -> None:
        if not self.group.is_main:
            return
        self.folder.trouble.mkdir(exist_ok=True)
        tensors = {name: t.cpu() for name, t in taken.batch._asdict().items() if t is not None}
        with replacing(self.folder.trouble / f"step-{taken.step:08d}.safetensors") as part:
            save_file(tensors, part)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def _record_step(self, step: int, loss: float, norm: float) -> None:
        tokens = step * self.config.batch * self.config.length
        record = {
            "kind": "step", "step": step, "tokens": tokens, "loss": loss,
            "lr": self.config.lr * self.config.rate(step - 1), "grad_norm": norm, **self.meter.speed(step),
            "seconds": self.seconds + time.perf_counter() - self._began, "memory_bytes": peak_memory(self.group.device),
        }  # fmt: skip
        self._write(record)
        self.meter.show(step, record)

    def _evaluate(self) -> None:
        with self._autocast():
            self.last_eval = evaluate(self.nats, self.corpus.val, self.config, self.group)
        reshard(self.model)
        loss, bits = self.last_eval
        tokens = self.step * self.config.batch * self.config.length
        self._write({"kind": "eval", "step": self.step, "tokens": tokens, "loss": loss, "bits_per_byte": bits})
        self._profile()
        for sink in self.sinks:
            sink.flush()

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
        self._write({"kind": "profile", "step": self.step, **found})

    def _save(self) -> None:
        extra = {
            "loader": self.loader.state_dict(), "guard": self.guard.state_dict(), "seconds": self.seconds,
            "last_eval": self.last_eval,
        }  # fmt: skip
        for sink in self.sinks:
            sink.flush()
        self.checkpoints.save(self.step, model=self.model, optimiser=self.optimiser, extra=extra)
        self._note_status("running")

    def _event(self, step: int, what: str, layer: str | None, detail: str) -> None:
        self._write({"kind": "event", "step": step, "what": what, "layer": layer, "detail": detail})

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _note_status(self, state: str, **facts: Any) -> None:
        if self.group.is_main:
            self.folder.set_status(state, step=self.step, of=self.config.steps, **facts)

    def _result(self, state: str, reason: str | None) -> Result:
        loss, bits = self.last_eval or (None, None)
        tokens = self.step * self.config.batch * self.config.length
        device = self.group.device
        speed = tokens / self.seconds if self.seconds else 0.0
        return Result(
            state, reason, loss, bits, self.step, tokens, self.seconds, speed, peak_memory(device), describe(device)
        )

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        return self.group.agree(self.asked_to_stop is not None)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask for a clean stop; a second one is not patient."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _frame: Any) -> None:
            if self.asked_to_stop is not None:
                raise KeyboardInterrupt
            self.asked_to_stop = f"{signal.Signals(number).name} received"
            self.meter.say("stopping after this step; once more to stop at once")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        self.loader.close()
        self.meter.close()
        for sink in self.sinks:
            sink.close()


def _prepare(config: TrainConfig, shown: bool) -> Corpus:
    options = {"tokenizer": config.tokenizer, "val_data": config.val_data, "val_fraction": config.val_fraction}
    return prepare(config.data, **options, progress=shown)


def _milestones(count: int, steps: int) -> set[int]:
    """`count` steps, evenly spread, the last of all among them."""
    return {max(1, steps * i // count) for i in range(1, count + 1)}


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
