"""First loss of an untrained model, against that of a guess, and the probability of the token just read.

V answers that are equally likely cost ln V nats. Random logits cost a little more: a head whose entries have the
standard deviation σ gives a state of width D and RMS ρ logits of variance D·σ²·ρ², which add ½·D·σ²·ρ². An untrained
model whose loss is higher than that repeats its input. With a tied head, a state that still is the embedding gives the
token just read a logit of D·σ: 15 at a width of 768, so that no test on a narrow model sees it.

Two users measure a `Start`. The check (`measure_start`) builds a model, draws tokens and targets evenly from the
vocabulary, and finds the head by hooks; the expected loss is then logsumexp(logits) - mean(logits). It holds for masked
models as it does for decoders: where a token is hidden, they would answer with the mask. Training (`start_of_run`)
takes the loss of the run's own task on a batch of its data.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.models.transformer import Transformer
from normlab.norms import widen
from normlab.probes.sharded import whole
from normlab.probes.untouched import at_rest

LENGTH = 24
"""Largest number of tokens drawn: one sequence without repetition."""

MOST_PARAMETERS = 2_000_000_000
"""Models with more parameters are not built for this: 8 GB in fp32."""

_LARGEST_RMS = 2.0
"""Of what a head reads, that its cost is excused by: two streams of RMS one that point the same way."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Initial loss of one model."""

    name: str
    """Name of the model: "125m, own head"."""
    width: int
    vocabulary: int
    """Vocabulary size V."""
    tied: bool
    """Whether head and embedding share one matrix."""
    loss: float
    """Mean cross-entropy in nats."""
    guess: float
    """Loss of uniform guessing, ln V."""
    random: float
    """½·D·σ²·ρ², the additional loss of random logits of this size."""
    read: float
    """Mean probability of the token just read; NaN if that is never the target."""
    head: str = ""
    """Path of the head, or of the embedding if tied."""
    judged: bool = True
    """False for a variant that is reported beside the design itself: the same with a tied head."""

    def limit(self, margin: float) -> float:
        """Largest initial loss that is fine.

        What random logits cost is excused up to ln V: with more, a few answers would take all of the probability.
        """
        return self.guess + min(self.random, self.guess) + margin

    @property
    def is_finite(self) -> bool:
        """Whether the first loss is a finite number."""
        return math.isfinite(self.loss)

    def is_far_above(self, margin: float) -> bool:
        """Whether the initial loss is above that limit."""
        return self.loss > self.limit(margin)


@dataclass(frozen=True)
class Fresh:
    """A model to measure before training, as a target offers it."""

    name: str
    build: Callable[[], nn.Module]
    """Builds the model with initial weights, on the CPU or the target's device."""
    logits: Callable[[nn.Module, Tensor], Tensor]
    """Logits of token ids (B, T)."""
    parameters: int
    with_tied: bool = False
    """Whether to measure a tied head on the same states as well."""
    is_fresh: bool = True
    """False if the weights may have been trained, as in a user's own module."""
    length: int = LENGTH
    """Number of tokens to draw; smaller for models with shorter sequences."""


def measure_start(fresh: Fresh, seed: int = 0) -> list[Start]:
    """The start of a model, with `with_tied` of two; nothing where it has no token inputs or no vocabulary head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = fresh.build()
    with at_rest(model):
        return _measured(fresh, model, seed)


@torch.no_grad()
def _measured(fresh: Fresh, model: nn.Module, seed: int) -> list[Start]:
    embedding, path = input_embedding(model)
    if embedding is None:
        return []
    ids = _tokens(embedding, fresh.length, seed)
    heard: list[_Reader] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            keep = _keep_reads(name, heard, embedding.num_embeddings)
            hooks.callback(module.register_forward_hook(keep).remove)
        logits = widen(fresh.logits(model, ids))
    if logits.shape != (*ids.shape, embedding.num_embeddings):
        return []
    head = _Head.found(heard, embedding, path)
    found = [_start(fresh.name, logits, ids, head, judged=True)]
    if fresh.with_tied and not head.tied and head.states is not None:
        tied = _Head(path, embedding.weight, head.states, tied=True)
        found.append(_start(fresh.name, head.states @ widen(embedding.weight).T, ids, tied, judged=False))
    return found


def input_embedding(model: nn.Module) -> tuple[nn.Embedding | None, str]:
    """(the model's input embedding, or else its first embedding; its path)."""
    named = getattr(model, "get_input_embeddings", lambda: None)()
    tables = {path: module for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if isinstance(named, nn.Embedding):
        return named, next((path for path, module in tables.items() if module is named), "")
    return next(((module, path) for path, module in tables.items()), (None, ""))


def _tokens(embedding: nn.Embedding, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(embedding.num_embeddings, generator=generator)[: min(length, LENGTH)]
    return ids[None].to(embedding.weight.device)


def _keep_reads(name: str, heard: list[_Reader], rows: int):
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        state = next((x for x in args if isinstance(x, Tensor) and x.is_floating_point()), None)
        if state is not None and isinstance(output, Tensor) and output.shape[-1] == rows:
            heard.append((name, module, state.detach()))

    return keep


_Reader = tuple[str, nn.Module, Tensor]
"""A module that reads states and returns a number for every token of the vocabulary."""


@dataclass(frozen=True)
class _Head:
    """The output head: its matrix (V, D), and the states that it read."""

    path: str
    matrix: Tensor
    states: Tensor | None
    tied: bool

    @staticmethod
    def found(heard: Sequence[_Reader], embedding: nn.Embedding, path: str) -> _Head:
        """The last module that mapped states to logits, or a part of it; the embedding if its weight was used."""
        if not heard:
            return _Head(path, embedding.weight, None, tied=True)
        outer, _, read = heard[-1]
        for name, module, states in reversed(heard):
            shape = (embedding.num_embeddings, states.shape[-1])
            own = next((p for p in module.parameters(recurse=False) if tuple(p.shape) == shape), None)
            if own is not None and (name == outer or name.startswith(f"{outer}.")):
                return _Head(name, own, widen(states), tied=own is embedding.weight)
        return _Head(outer, embedding.weight, widen(read), tied=True)

    @property
    def random(self) -> float:
        """½·D·σ²·ρ²."""
        matrix = widen(self.matrix)
        rms = 1.0 if self.states is None else float(self.states.square().mean().sqrt())
        return 0.5 * matrix.shape[1] * float(matrix.var()) * min(rms, _LARGEST_RMS) ** 2


def _start(name: str, logits: Tensor, ids: Tensor, head: _Head, *, judged: bool) -> Start:
    total = logits.logsumexp(-1)
    return Start(
        name=name,
        width=head.matrix.shape[1],
        vocabulary=logits.shape[-1],
        tied=head.tied,
        loss=float((total - logits.mean(-1)).mean()),
        guess=math.log(logits.shape[-1]),
        random=head.random,
        read=read_probability(logits, ids),
        head=head.path,
        judged=judged,
    )


def start_of_run(model: Transformer, loss: Tensor, read: float | None) -> Start:
    """The start of one of NormLab's own models, from its first loss on a batch; `read` as `read_probability` has it.

    All ranks call it.
    """
    return Start(
        name="",
        width=model.config.dim,
        vocabulary=model.config.answers,
        tied=model.head.weight is None,
        loss=float(loss),
        guess=math.log(model.config.answers),
        random=float(whole(model.logit_variance())) / 2.0,
        read=math.nan if read is None else read,
    )


def read_probability(logits: Tensor, ids: Tensor) -> float:
    """Mean probability that logits (B, T, V) give to the tokens (B, T) they were computed from."""
    logits = widen(logits.detach())
    chosen = logits.gather(-1, ids[..., None]).squeeze(-1)
    return float((chosen - logits.logsumexp(-1)).exp().mean())


def echoes(start: Start, limit: float) -> bool:
    """Whether a model starts by repeating the token just read."""
    return not start.read < limit


def worst_start(starts: Sequence[Start], margin: float) -> Start:
    """The start whose loss is furthest above its limit; one that is not finite comes first."""
    return max(starts, key=lambda start: (not start.is_finite, start.loss - start.limit(margin)))
