"""Recording: systems are simulated chunk by chunk, and of every state that passes only what was asked for is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from normlab.dynamics import laws
from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.drift import MLP
from normlab.dynamics.flow import Flow, State
from normlab.dynamics.names import Observable
from normlab.dynamics.network import Network
from normlab.dynamics.observables import View, take
from normlab.dynamics.pairs import histogram
from normlab.dynamics.systems import Chunk, chunks, device, dtype, integrator, look_times, start
from normlab.dynamics.weights import Drawn, layers
from normlab.errors import NormLabError
from normlab.schemes.base import Scheme
from normlab.schemes.law import Law

Spec = str | Scheme | Law
"""What can be simulated."""

Tell = Callable[[str, float], None]
"""Hears what is being done, and the share of it that is done."""


def label(spec: Spec) -> str:
    """What a law is called in tables."""
    return "law" if isinstance(spec, Law) else str(laws.scheme_of(spec) or spec)


def silent(what: str, share: float) -> None:
    """For who does not want to hear."""


@dataclass
class Record:
    """What is left of the orbits of all systems."""

    times: np.ndarray
    values: dict[str, np.ndarray]
    """By observable: (looks, β, seeds)."""
    histogram: np.ndarray | None
    """(looks, β, bins), mean over seeds."""
    paths: np.ndarray | None
    """(looks, β, tokens, d) of the first seed: some tokens, for drawing."""


def record(
    config: SimulateConfig,
    spec: Spec,
    *,
    observables: Iterable[Observable] | None = None,
    times: list[float] | None = None,
    tell: Tell = silent,
) -> Record:
    """Follow a law from time zero; `times` are those of the looks where they are not spread evenly."""
    moments, name = times or look_times(config), label(spec)
    book, done = _Book(config, observables, moments), 0
    for chunk in chunks(config):
        for look, (state, flow) in enumerate(orbit(config, spec, chunk, moments)):
            book.write(look, done, state, flow)
            tell(name, (done + len(chunk) * (look + 1) / len(moments)) / book.systems)
        done += len(chunk)
    return book.record()


def orbit(config: SimulateConfig, spec: Spec, chunk: Chunk, times: list[float]) -> Iterator[tuple[State, Flow]]:
    """The states of some systems at each of the times, with the flow that moves them."""
    law, begin = laws.find(spec, config.layers), start(config, chunk.seeds)
    place = {"dtype": dtype(config), "device": device(config)}
    weights = Drawn(
        matrices=config.weights,
        dim=config.dim,
        heads=config.heads,
        redraw=config.redraw,
        seeds=chunk.seeds,
        **place,
    )
    beta = torch.tensor(chunk.betas, **place)
    attention = layers(weights, beta=beta, causal=config.causal, kind=config.kind)
    drift = MLP(dim=config.dim, hidden=config.mlp, seeds=chunk.seeds) if config.mlp else None
    flow = Flow(law, attention, drift)
    if config.method == "network":
        scheme = laws.scheme_of(spec)
        if scheme is None:
            raise NormLabError(f"{label(spec)} is a law without a block, so it has no network; try rk4")
        states = Network(scheme, attention, depth=config.layers, cut=config.cut, drift=drift).orbit(begin, times)
    else:
        states = integrator(config).orbit(flow, begin, times)
    return ((state, flow) for state in states)


class _Book:
    """A record on its way, made whole at the start: pieces among the integrator's would hold on to its memory."""

    def __init__(self, config: SimulateConfig, observables: Iterable[Observable] | None, times: list[float]):
        self.config, self.times = config, times
        self.names = tuple(config.observables if observables is None else observables)
        self.systems, looks = len(config.beta) * config.seeds, len(times)
        self.values = np.zeros((len(self.names), looks, self.systems))
        self.bars = np.zeros((looks, len(config.beta), config.bins))
        drawn = min(config.shown, config.tokens)
        self.paths = np.zeros((looks, len(config.beta), drawn, config.dim), dtype=np.float32)

    @torch.no_grad()
    def write(self, look: int, first: int, state: State, flow: Flow) -> None:
        """What is asked for of one state of the systems from `first` on."""
        found = take(View(state, flow, self.config.angle), self.names)
        for row, name in zip(self.values, self.names, strict=True):
            row[look, first : first + len(state.time)] = found[name].cpu().numpy()
        places = [divmod(first + k, self.config.seeds) for k in range(len(state.time))]
        if self.config.bins:
            shares = histogram(state.theta, self.config.bins).cpu().numpy() / self.config.seeds
            np.add.at(self.bars[look], [beta for beta, _ in places], shares)
        if self.config.shown:
            drawn = [k for k, (_, seed) in enumerate(places) if seed == 0]
            kept = state.theta[drawn, : self.config.shown].float().cpu().numpy()
            self.paths[look, [places[k][0] for k in drawn]] = kept

    def record(self) -> Record:
        shape = (len(self.times), len(self.config.beta), self.config.seeds)
        return Record(
            times=np.asarray(self.times),
            values={name: row.reshape(shape) for name, row in zip(self.names, self.values, strict=True)},
            histogram=self.bars if self.config.bins else None,
            paths=self.paths if self.config.shown else None,
        )
