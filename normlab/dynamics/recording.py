"""Recording: systems are simulated chunk by chunk, and of every state that passes only what was asked for is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from normlab.dynamics.choices import Observable
from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.measure.observables import StateView, take
from normlab.dynamics.measure.pairs import histogram
from normlab.dynamics.system import batching, laws
from normlab.dynamics.system.drift import RandomMLP
from normlab.dynamics.system.flow import Flow, Layers, ParticleState
from normlab.dynamics.system.network import Network
from normlab.dynamics.system.systems import SystemChunk, chunks, device, dtype, integrator, look_times, start
from normlab.dynamics.system.threads import suited
from normlab.dynamics.system.weights import Drawn, Weights, layers
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.scheme import Scheme

Spec = str | Scheme | Law
"""What can be simulated."""

Tell = Callable[[str, float], None]
"""Hears what is being done, and the share of it that is done."""


def label(spec: Spec) -> str:
    """What a law is called in tables."""
    scheme = laws.scheme_of(spec)
    return "law" if isinstance(spec, Law) else str(spec) if scheme is None else scheme.label


def silent(what: str, share: float) -> None:
    """For who does not want to hear."""


@dataclass
class Recording:
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
) -> Recording:
    """Follow a law from time zero; `times` are those of the looks where they are not spread evenly."""
    return records(config, [spec], observables=observables, times=times, tell=tell)[0]


def records(
    config: SimulateConfig,
    specs: Sequence[Spec],
    *,
    observables: Iterable[Observable] | None = None,
    times: list[float] | None = None,
    matrices: Weights | None = None,
    tell: Tell = silent,
) -> list[Recording]:
    """Follow several laws from the same tokens; where systems are small and few, those of all laws in one batch.

    `matrices` are the weights of all systems, in place of those that the configuration draws.
    """
    moments = times or look_times(config)
    books = [_Book(config, observables, moments) for _ in specs]
    passed, total = 0, len(specs) * len(moments) * len(config.beta) * config.seeds
    for places in batching.groups(config, [laws.find(spec, config.layers) for spec in specs]):
        chosen, done = [specs[place] for place in places], 0
        names = ", ".join(map(label, chosen))
        for chunk in chunks(config):
            for look, states in enumerate(orbits(config, chosen, chunk, moments, matrices)):
                for place, (state, flow) in zip(places, states, strict=True):
                    books[place].write(look, done, state, flow)
                passed += len(chunk) * len(places)
                tell(names, passed / total)
            done += len(chunk)
    return [book.record() for book in books]


def orbit(
    config: SimulateConfig, spec: Spec, chunk: SystemChunk, times: list[float]
) -> Iterator[tuple[ParticleState, Flow]]:
    """The states of some systems at each of the times, with the flow that moves them."""
    return (states[0] for states in orbits(config, [spec], chunk, times))


def orbits(
    config: SimulateConfig,
    specs: Sequence[Spec],
    chunk: SystemChunk,
    times: list[float],
    matrices: Weights | None = None,
) -> Iterator[list[tuple[ParticleState, Flow]]]:
    """At each of the times the states of some systems under each law, with the flow that moves them."""
    found = [laws.find(spec, config.layers) for spec in specs]
    every = SystemChunk(chunk.betas * len(specs), chunk.seeds * len(specs))
    flow, begin = Flow(batching.joined(found), *_forces(config, every, matrices)), start(config, every.seeds)
    flows = [flow] if len(specs) == 1 else [Flow(law, *_forces(config, chunk, matrices)) for law in found]
    for state in _states(config, specs, flow, begin, times):
        parts = zip(*(part.chunk(len(specs)) for part in state), strict=True)
        yield [(ParticleState(*part), own) for part, own in zip(parts, flows, strict=True)]


def _forces(config: SimulateConfig, chunk: SystemChunk, matrices: Weights | None) -> tuple[Layers, RandomMLP | None]:
    """Attention, and the MLP where there is one."""
    place = {"dtype": dtype(config), "device": device(config)}
    weights = matrices or Drawn(
        matrices=config.weights, dim=config.dim, heads=config.heads, redraw=config.redraw, seeds=chunk.seeds, **place
    )
    beta = torch.tensor(chunk.betas, **place)
    attention = layers(weights, beta=beta, causal=config.causal, kind=config.kind)
    return attention, RandomMLP(dim=config.dim, hidden=config.mlp, seeds=chunk.seeds) if config.mlp else None


def _states(
    config: SimulateConfig, specs: Sequence[Spec], flow: Flow, begin: ParticleState, times: list[float]
) -> Iterator[ParticleState]:
    """By the law, or by the blocks of the one scheme that there is."""
    if config.method != "network":
        return integrator(config).orbit(flow, begin, times)
    scheme = laws.scheme_of(specs[0])
    if scheme is None:
        raise NormLabError(f"{label(specs[0])} is a law without a block, so it has no network; try rk4")
    network = Network(scheme, flow.attention, depth=config.layers, cut=config.cut, drift=flow.drift)
    return network.orbit(begin, times)


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
    def write(self, look: int, first: int, state: ParticleState, flow: Flow) -> None:
        """What is asked for of one state of the systems from `first` on."""
        with suited(state.theta):
            found = take(StateView(state, flow, self.config.angle), self.names)
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

    def record(self) -> Recording:
        shape = (len(self.times), len(self.config.beta), self.config.seeds)
        return Recording(
            times=np.asarray(self.times),
            values={name: row.reshape(shape) for name, row in zip(self.names, self.values, strict=True)},
            histogram=self.bars if self.config.bins else None,
            paths=self.paths if self.config.shown else None,
        )
