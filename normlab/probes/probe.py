"""`normlab.probe`: profile a live model during one training step of the caller's own loop.

    with normlab.probe(model, step=7) as look:
        loss = model(**batch).loss
        loss.backward()
        optimiser.step()
    look.profile.rms

The model runs eagerly meanwhile, since torch.compile drops hooks. It is not changed, no random number is drawn, and
with `active=False` no hook is installed. Measures are computed in fp32 or better whatever the model's format. They are
copied to the host once, when the step ends; reading a profile waits for the copy.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# The context manager and its probe are one unit.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import widen
from normlab.probes.attention import Rows, watch_attention
from normlab.probes.block_hooks import StackWatch
from normlab.probes.blocks import eager, find_stacks
from normlab.probes.first_nonfinite import OutputWatch, module_names
from normlab.probes.ledger import Ledger
from normlab.probes.outputs import Batch, LossFn, loss_and_logits, own_loss
from normlab.probes.pooling import mean, pool, root_mean_square
from normlab.probes.profile import Number, Profile
from normlab.probes.untouched import eager_mode, untouched
from normlab.probes.weight_updates import WeightWatch

_TOKENS = 1024
"""Largest number of tokens whose logits are measured."""


class Probe:
    """A measurement in progress; afterwards its profiles. Made by `probe`."""

    def __init__(self, *, step: int = 0, seed: int = 0):
        self.step, self.seed = step, seed
        self.active = False
        self._over = False
        self._ledger = Ledger()
        self._stacks: list[StackWatch] = []
        self._weights: list[WeightWatch] = []
        self._losses: list[int] = []
        self._told_losses: list[int] = []
        self.on_loss: Callable[[torch.Tensor], None] | None = None
        """Called with the losses of steps that are not profiled."""
        self._logits: list[dict[str, int]] = []
        self._logit_rows: list[int] = []
        self._profiles: dict[str, Profile] | None = None

    @property
    def profiles(self) -> dict[str, Profile]:
        """A profile for each stack that ran, by its path, the one with most blocks first; none if not active."""
        if self.active and not self._over:
            raise NormLabError("probe: there is no profile before the step is over; read it after the with block")
        if self._profiles is None:
            self._profiles = {watch.stack.name: self._profile(watch, weights) for watch, weights in self._heard()}
        return self._profiles

    @property
    def is_there(self) -> bool:
        """Whether the step is over and its numbers have reached the host: `profiles` will not wait."""
        return self._over and self._ledger.is_there

    @property
    def profile(self) -> Profile:
        """The profile of the stack with most blocks."""
        if not self.profiles:
            raise NormLabError("probe: nothing was looked at; expected a probe with active=True")
        return next(iter(self.profiles.values()))

    def record(self, *, loss: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> None:
        """Record a loss or logits that are not part of the model's output."""
        if loss is not None and self.on_loss is not None:
            self.on_loss(loss)
        if self.active and loss is not None:
            self._told_losses.append(self._ledger.write(loss.detach().mean()))
        if self.active and logits is not None and logits.numel():
            self._logits.append(self._ledger.write_all(_logit_sizes(logits.detach())))
            self._logit_rows.append(logits.numel() // logits.shape[-1])

    def _attach(self, model: nn.Module, pattern: str | None, want_gradients: bool, hooks: ExitStack) -> None:
        stacks = find_stacks(model, pattern)
        names = module_names(model)
        self._modules = OutputWatch({**names, eager(model): type(eager(model)).__name__}, self._ledger)
        self._stacks = [StackWatch(stack, self._ledger, want_gradients=want_gradients) for stack in stacks]
        self._weights = [WeightWatch(stack, self._ledger) for stack in stacks]
        for watch in [*self._stacks, *self._weights, self._modules]:
            watch.listen(hooks)
        hooks.callback(eager(model).register_forward_hook(self._on_output).remove)
        hooks.enter_context(watch_attention(self._attend))
        self.active = True

    def _attend(self, rows: Rows) -> None:
        # The innermost of the blocks that run now: any() stops at the first stack that takes it.
        any(watch.attend(rows) for watch in self._stacks)

    def _on_output(self, _model: nn.Module, _args: Any, output: Any) -> None:
        loss, logits = loss_and_logits(output)
        if loss is not None:
            self._losses.append(self._ledger.write(loss.detach().mean()))
        self.record(logits=logits)

    def _finish(self) -> None:
        for watch in [*self._stacks, *self._weights]:
            watch.finish()
        self._ledger.close()
        for watch in [watch for watch, _ in self._heard()] or self._stacks:
            watch.check()
        self._over = True

    def _heard(self) -> list[tuple[StackWatch, WeightWatch]]:
        return [pair for pair in zip(self._stacks, self._weights, strict=True) if pair[0].passes]

    def _profile(self, watch: StackWatch, weights: WeightWatch) -> Profile:
        series = pool(watch.passes, self._ledger)
        blocks = [call.block for call in watch.passes[0].calls]
        series |= weights.series(blocks) | {"weight_rms": weights.sizes(blocks)}
        losses = self._told_losses or self._losses
        # A loss for each pass is weighed like all else of the pass; of others nobody knows how much they stand for.
        tokens = [one.tokens for one in watch.passes]
        profile = Profile(
            boundaries=len(series["rms"]),
            step=self.step,
            seed=self.seed,
            loss=self._pooled(mean, losses, tokens if len(tokens) == len(losses) else [1] * len(losses)),
            logits_rms=self._pooled(root_mean_square, [sizes["rms"] for sizes in self._logits], self._logit_rows),
            logsumexp=self._pooled(mean, [sizes["logsumexp"] for sizes in self._logits], self._logit_rows),
            **series,
        )
        culprit = self._culprit(profile, watch)
        return dataclasses.replace(profile, nan_first=culprit and f"{culprit} at step {self.step}")

    def _pooled(self, by: Callable[[list[float], list[int]], float], places: list[int], rows: list[int]) -> Number:
        return by([self._ledger[place] for place in places], rows) if places else None

    def _culprit(self, profile: Profile, watch: StackWatch) -> str | None:
        """The module to blame. An output alone raises no alarm: some modules return −inf by design, as a mask."""
        if profile.first_broken is not None or {"loss", "logits_rms"} & profile.unfit.keys():
            return self._modules.first(with_call=True) or "the loss"
        paths = watch.paths()
        # The gradient goes from the last boundary to the first: the last broken one is where it began.
        broken = [place for place, share in enumerate(profile.grad_broken) if share]
        if broken and broken[-1] == profile.depth:
            return f"the gradient that reaches {watch.stack.name}"
        if broken or "grad_w" in profile.unfit:
            return f"the gradient of {paths[broken[-1] if broken else profile.unfit['grad_w'][-1]]}"
        return None


@contextmanager
def probe(
    model: nn.Module,
    *,
    blocks: str | None = None,
    step: int = 0,
    seed: int = 0,
    active: bool = True,
    want_gradients: bool = False,
) -> Generator[Probe, None, None]:
    """Measure activations, gradients and attention of a model during one step of your own training loop.

        with normlab.probe(model) as look:
            loss_of(model(batch)).backward()
            optimiser.step()
        look.profile.rms  # one number for each boundary between blocks

    All passes inside count as one batch (gradient accumulation).
    `blocks` is a pattern of the blocks, `model.layers.*`, where they are not found. `active=False` does nothing: for
    loops that profile every 50th step. `want_gradients` measures the gradient of the first state even if all before it
    is frozen.
    """
    look = Probe(step=step, seed=seed)
    with ExitStack() as hooks:
        if active:
            hooks.enter_context(eager_mode())
            look._attach(model, blocks, want_gradients, hooks)
        yield look
    if active:
        look._finish()


def measure(model: nn.Module, batch: Batch, loss_fn: LossFn | None = None, **options: Any) -> Profile:
    """The profile of the stack with most blocks; see `measure_stacks`."""
    return next(iter(measure_stacks(model, batch, loss_fn, **options).values()))


def measure_stacks(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None = None,
    *,
    blocks: str | None = None,
    step: int = 0,
    seed: int = 0,
    keep_grads: bool = False,
) -> dict[str, Profile]:
    """Run one forward and one backward pass; return a profile for each stack. The model is restored afterwards.

    `loss_fn(model, batch)` returns the loss; without it the model is called with the batch and must return its loss, as
    published models do when they are given labels. `keep_grads` leaves the pass's gradients in the parameters.
    """
    with untouched(model, keep_grads), probe(model, blocks=blocks, step=step, seed=seed, want_gradients=True) as look:
        loss = (loss_fn or own_loss)(model, batch)
        look.record(loss=loss)
        if loss.requires_grad:
            loss.backward()
    return look.profiles


@torch.no_grad()
def _logit_sizes(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = logits.reshape(-1, logits.shape[-1])
    chosen = torch.arange(min(len(rows), _TOKENS), device=rows.device) * len(rows) // min(len(rows), _TOKENS)
    sample = widen(rows[chosen])
    return {"rms": sample.square().mean().sqrt(), "logsumexp": sample.logsumexp(-1).mean()}
